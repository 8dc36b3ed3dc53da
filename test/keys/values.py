"""A value of each key that is not its default, and keys that one run cannot show."""

from __future__ import annotations

from .modes import Mode


def _float32(mode: Mode) -> bool:
    return mode.sections.get("train_model", {}).get("torch_dtype") != "bfloat16" and (
        mode.sections.get("train_model", {}).get("head") != "logits")


def _transformers_workers(mode: Mode) -> bool:
    return mode.sections.get("inference_model", {}).get("backend") == "transformers" and (
        mode.sections.get("train", {}).get("staleness") != 0)


def _reads_checkpoints(mode: Mode) -> bool:
    return mode.sections.get("inference_model", {}).get("server") == "vllm"


def _no_reference(mode: Mode) -> bool:
    return (mode.script != "atropos" and "lora" not in mode.sections.get("train_model", {})
            and "kl_to_ref_coeff" not in mode.sections.get("train", {}))


#: By key: values to try, of which the first is taken that the mode does not have.
VALUES = {key: [value] for key, value in {
    "device": "cuda",
    "env.dataset": "other_arithmetic", "env.data_path": "/nowhere", "env.name": "countdown",
    "env.id": "vf_env", "env.url": "http://127.0.0.1:8123", "env.port": 9123,
    "env.forward_ports": [9804],
    "env.task": {"max_operand": 5, "num_train": 20, "num_test": 4},
    "env.path": "sums.jsonl", "env.dataset_mixture": {"datasets": [{"id": "sums.jsonl"}]},
    "env.prompt_column": "question", "env.answer_column": "answer",
    "env.system_prompt": "Add.", "env.thinking_prompt": "Think.",
    "env.chat_template": "{{% for m in messages %}}{{{{ m['content'] }}}}{{% endfor %}}",
    "env.reward": "negative_length", "env.reward_weights": [2.0], "env.reward_timeout": 7.5,
    "env.reward_options": {"test.training.runs:by_text": {"scale": 2.0}},
    "env.max_steps": 3, "env.reward_workers": 1, "env.max_reward_errors": 0.9,
    "env.num_envs": 4, "env.repeats": 2, "env.max_prompt_tokens": 3,
    "model.name": "{reference}", "model.warm_start_steps": 3, "model.warm_start_noise": 0.2,
    "train.exp_name": "other", "train.seed": 3, "train.total_dialog_turns": 24,
    "train.max_steps": 3, "train.data_epochs": 2.0,
    "train.dialog_turns_per_batch": 16, "train.optim_batch_size": 2,
    "train.gradient_accumulation_steps": 3, "train.max_tokens_per_micro_batch": 13,
    "train.packing": True, "train.eval_frequency": 3, "train.checkpoint_frequency": 3,
    "train.keep_checkpoints": 1, "train.proof_interval": 2,
    "train.clip_epsilon": [0.1, 0.3], "train.objective_options": {"delta": 3.0},
    "train.proximal": "scored", "train.mismatch": {"mis": [0.5, 2.0]},
    "train.off_policy_delta": 0.1, "train.entropy_top_fraction": 0.2,
    "train.kl_to_ref_coeff": 0.2, "train.kl_to_inference_coeff": 0.2, "train.kl_estimator": "k2",
    "train.kl_in_reward": True, "train.entropy_coeff": 0.2, "train.advantage_estimator": "rloo",
    "train.advantage_eps": 0.5, "train.advantage_clip_percentile": 20.0,
    "train.zero_variance_filter": True, "train.mask_truncated": True,
    "train.overlong_buffer": 3.0, "train.overlong_factor": 0.5, "train.max_sampling_rounds": 3,
    "train.staleness": 2, "train.update_at": "group_border", "train.group_deadline": 50.0,
    "train.oversample": 0.5, "train.rollout_timeout": 99.0,
    "train_model.torch_dtype": "bfloat16", "train_model.attn_implementation": "eager",
    "train_model.gradient_checkpointing": True, "train_model.compile": True,
    "train_model.head_chunk_size": 7, "train_model.fp32_head": True,
    "train_model.quantization": "int8",
    "train_model.layer_indices": [1], "train_model.devices": [0],
    "train_model.lora.enabled": True, "train_model.lora.r": 3, "train_model.lora.alpha": 5.0,
    "train_model.lora.dropout": 0.3, "train_model.lora.target_modules": ["q_proj"],
    "train_model.lora.layer_indices": [1],
    "inference_model.url": "http://127.0.0.1:9100", "inference_model.server": "vllm",
    "inference_model.connections": 3, "inference_model.temperature": 0.5,
    "inference_model.max_tokens": 4, "inference_model.max_model_len": 40,
    "inference_model.max_num_seqs": 3, "inference_model.gpu_memory_utilization": 0.3,
    "inference_model.kv_cache_memory_bytes": 77777, "inference_model.ignore_eos": True,
    "inference_model.enforce_eager": True,
    "inference_model.num_devices": 3, "inference_model.devices": [0],
    "inference_model.tensor_parallel_size": 2,
    "ref_model.name": "{reference}", "ref_model.devices": [0],
    "ref_model.sharded": True,
    "policy.kl_coef": 0.05,
    "optimizer.name": "adafactor", "optimizer.lr": 0.02, "optimizer.betas": [0.5, 0.6],
    "optimizer.eps": 0.5, "optimizer.weight_decay": 0.5, "optimizer.clip_grad_norm": 0.01,
    "optimizer.warmup_steps": 4, "optimizer.schedule": "cosine",
    "optimizer.final_lr_fraction": 0.5, "optimizer.scale_parameter": True,
    "optimizer.relative_step": True,
    "logging.backends": ["tensorboard"], "logging.wandb_project": "p", "logging.wandb_group": "g",
    "logging.wandb_run_name": "n", "logging.wandb_mode": "offline", "logging.num_samples": 2,
    "logging.legacy_names": "atropos",
    "eval.batch_size": 3, "eval.samples": 4, "eval.temperature": 0.5, "eval.k": [2],
    "eval.seed": 3,
    "eval.benchmarks": {"arithmetic": {"task": {"num_test": 3}}},
    "eval.benchmark_max_tokens": 3, "eval.at_checkpoints": True,
    "kl_controller.target": 0.2, "kl_controller.horizon": 7.0, "kl_controller.step": 0.7,
    "kl_controller.band": 1.7, "kl_controller.factor": 1.7,
    "entropy_controller.target": 0.2, "entropy_controller.step": 0.7,
    "entropy_controller.minimum": 0.05, "entropy_controller.maximum": 0.7,
    "maxent.tau": 0.7, "maxent.beta": 0.2, "maxent.q_temperature": 0.7, "maxent.q_epsilon": 0.2,
    "maxent.length_normalize_ref": False, "maxent.tau_target": 0.5, "maxent.tau_step": 0.7,
    "maxent.tau_minimum": 0.2, "maxent.tau_maximum": 7.0,
    "distill.teacher": "{reference}", "distill.reverse_kl_coeff": 0.7, "distill.topk_coeff": 0.7,
    "distill.topk": 7, "distill.temperature": 0.7,
    "ray.max_restarts": 7, "ray.start_timeout": 99.0,
    "atropos.url": "http://127.0.0.1:8123", "atropos.steps": 3, "atropos.batch_size": 4,
    "atropos.seq_len": 10, "atropos.timeout": 0.7, "atropos.bridge": True,
    "atropos.max_staleness": 3, "atropos.restart_interval": 2, "atropos.vllm_port": 9123,
    "atropos.forward_ports": [9804], "atropos.vllm_gpu": 0,
    "atropos.bridge_config": "vllm_bridge_config.json",
    "atropos.save_path": "elsewhere", "atropos.log_dir": "elsewhere",
    "atropos.eval_max_tokens": 3, "atropos.dump_batch": True, "atropos.debug_loading": True,
    "atropos.benchmark": True,
}.items()} | {
    "train.epochs": [2, 3], "train.objective": ["reinforce", "cispo"],
    "train.aggregation": ["sequence", "prompt"], "train_model.head": ["chunked", "fused"],
    "train_model.num_devices": [2, 3], "ref_model.num_devices": [1, 2],
    "inference_model.backend": ["transformers", "vllm"],
    "inference_model.engine": ["server", "process"],
    "inference_model.weight_sync": ["reload", "transfer"],
    "kl_controller.kind": ["band", "horizon"],
}

#: Keys whose effect is outside of a run, or takes what is not here; and where it is shown.
ELSEWHERE = {
    "env.reward_processes": "test/end_to_end/test_rewards.py: no other process finds the rewards "
                            "of these tests",
    "env.reward_memory": "test/end_to_end/test_rewards.py: the same",
    "resume": "test/run/test_resume.py: it chooses the folder before anything is built",
    "ray.address": "test_config_async.py: test_without_an_address_ray_is_the_runs_own",
    "env.environment": "test/end_to_end/test_atropos.py: it starts a hub and an environment",
    "env.step": "a mode of its own here, 'dialog', whose model ends its turns",
    "eval.lm_eval_path": "test/run/test_lm_eval.py: it is read with a task of lm-eval alone",
    "atropos.evaluate": "a mode of its own here, 'atropos, one copy, evaluated'",
}

#: Keys that ask, in some modes, for what is so in any case: they are kept, whoever reads them.
HOLDS = {
    "train_model.fp32_head": _float32,
    "inference_model.weight_sync": _reads_checkpoints,
    "train.update_at": _transformers_workers,
    # Other ranks are started there: test/collectors/test_async_ranks.py.
    "train_model.num_devices": lambda mode: mode.has_workers,
    # They stay idle there, which a line says: test/run/test_placement.py.
    "ref_model.num_devices": _no_reference, "ref_model.devices": _no_reference,
    # atropos-grpo-run logs its hub there; atropos-grpo refuses it, see test_flags.py.
    "atropos.log_dir": lambda mode: bool(
        mode.sections.get("atropos", {}).get("bridge")
        or mode.sections["inference_model"].get("url")),
}
