"""What each name of TRL's GRPOConfig, of its scripts and of open-r1 is here: a table of data.

Names and defaults are TRL 1.16's, of Transformers 5's ``TrainingArguments`` beneath it in
:mod:`grpo.config.trl_names.training`, and open-r1's at its last release.
:mod:`grpo.config.trl_names.translate` translates by the table; ``docs/trl.md`` is made of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Rule = Literal["same", "joint", "refused", "no effect"]


@dataclass(frozen=True)
class Field:
    """One name.

    Attributes:
        rule: "same": another name of the key ``to``; "joint": its value, with that of others, says
            what the keys ``to`` are; "refused": it has nothing here, but for values that ask for
            what happens anyway; "no effect": it changes no result of a run, and is named.
        default: TRL's.
        to: the keys of today.
        text: what differs, what to write instead, or why it has no effect.
        taken: the default is taken where a whole configuration is TRL's; of "same" alone.
        accepts: further values that ask for what happens anyway.
        group: of a "joint", whose names are translated together.
    """

    rule: Rule
    default: Any = None
    to: tuple[str, ...] = ()
    text: str = ""
    taken: bool = False
    accepts: tuple[Any, ...] = ()
    group: str = ""


def same(to: str, default: Any = None, text: str = "", *, taken: bool = False) -> Field:
    return Field("same", default, (to,), text, taken=taken)


def joint(group: str, to: str, default: Any = None, text: str = "") -> Field:
    return Field("joint", default, tuple(to.split()), text, group=group)


def refused(text: str, default: Any = None, *accepts: Any) -> Field:
    return Field("refused", default, text=text, accepts=accepts)


def no_effect(text: str, default: Any = None) -> Field:
    return Field("no effect", default, text=text)


_WHOLE_DISTRIBUTION = "tokens are sampled from the distribution that is trained; leave it out"
_BATCH = "env.num_envs env.repeats train.optim_batch_size"
_MISMATCH = "train.proximal train.mismatch"
_CONTROLLER = "train.entropy_coeff entropy_controller.target"
_VESPO = "loss_type=vespo is not here; use sapo, or train.objective=cispo"
_REFERENCE = ("the reference stays the model that the run starts from; begin another run from "
              "final_model/ instead")
_TOOLS = "write env.step, env.max_steps, or use env=verifiers for tools"
_SAMPLES = "samples are shown and saved at each evaluation, logging.num_samples of them"
_BATCHING = "Transformers generates without it; leave it out, or write use_vllm=true"

#: Those of TRL's GRPOConfig itself.
GRPO_CONFIG = {
    "learning_rate": same("optimizer.lr", 1e-6, taken=True),
    "model_init_kwargs": refused("write dtype, attn_implementation or model_revision", None, {}),
    "trust_remote_code": refused("models are those of Transformers; code of a model's repository "
                                 "is not run", False),
    "router_aux_loss_coef": refused("mixtures of experts are trained without a loss of the router; "
                                    "leave it out", None, 0, 0.0),
    "disable_dropout": no_effect("the models that are trained here have none", False),
    "cast_lm_head_to_fp32": same("train_model.fp32_head", False),
    "remove_unused_columns": no_effect("reward functions get every column", False),
    "num_generations": joint("batch", "env.repeats", 8),
    "num_generations_eval": same("eval.samples", None, "beside one greedy completion"),
    "max_completion_length": same("inference_model.max_tokens", 512, taken=True),
    "ds3_gather_for_generation": no_effect("DeepSpeed is not used", True),
    "shuffle_dataset": refused("prompts are drawn in a shuffled order; leave it out", True),
    "pad_to_multiple_of": no_effect("the gradient does not depend on padding", "auto"),
    "generation_batch_size": joint("batch", _BATCH),
    "steps_per_generation": joint("batch", _BATCH),
    "temperature": same("inference_model.temperature", 1.0),
    "top_p": refused(_WHOLE_DISTRIBUTION, 1.0),
    "top_k": refused(_WHOLE_DISTRIBUTION, 0, -1),
    "min_p": refused(_WHOLE_DISTRIBUTION, None, 0, 0.0),
    "generation_kwargs": refused(_WHOLE_DISTRIBUTION, None, {}),
    "chat_template_kwargs": refused("give a template that has them, as chat_template", None, {}),
    "repetition_penalty": refused(_WHOLE_DISTRIBUTION, 1.0),
    "cache_implementation": no_effect("the cache is vLLM's, or Transformers' own"),
    "use_vllm": joint("engine", "inference_model.backend", False),
    "vllm_mode": joint("engine", "inference_model.engine", "colocate"),
    "vllm_model_impl": refused("vLLM's own models are what weights are shared with", "vllm"),
    "vllm_enable_sleep_mode": no_effect("trainer and engine have one copy of the weights; there "
                                        "is nothing to offload", False),
    "vllm_structured_outputs_regex": refused(_WHOLE_DISTRIBUTION),
    "vllm_server_base_url": joint("engine", "inference_model.url"),
    "vllm_server_host": joint("engine", "inference_model.url", "0.0.0.0"),
    "vllm_server_port": joint("engine", "inference_model.url", 8000),
    "vllm_server_timeout": no_effect("a server at a url has to answer when the run begins", 240.0),
    "vllm_group_port": no_effect("weights need no port of their own", 51216),
    "vllm_gpu_memory_utilization": same(
        "inference_model.gpu_memory_utilization", 0.3,
        "TRL's default is not taken: the cache is sized for one batch"),
    "vllm_max_model_length": same("inference_model.max_model_len"),
    "vllm_tensor_parallel_size": refused("engines of several devices have devices of their own: "
                                         "write inference_model.num_devices and "
                                         "inference_model.tensor_parallel_size", 1),
    "beta": joint("kl", "train.kl_to_ref_coeff", 0.0),
    "num_iterations": joint("batch", "train.epochs", 1),
    "epsilon": joint("loss", "train.clip_epsilon", 0.2),
    "delta": joint("loss", "train.objective_options"),
    "epsilon_high": joint("loss", "train.clip_epsilon"),
    "sapo_temperature_neg": joint("loss", "train.objective_options", 1.05),
    "sapo_temperature_pos": joint("loss", "train.objective_options", 1.0),
    "vespo_k_pos": refused(_VESPO, 2.0),
    "vespo_lambda_pos": refused(_VESPO, 3.0),
    "vespo_k_neg": refused(_VESPO, 3.0),
    "vespo_lambda_neg": refused(_VESPO, 2.0),
    "importance_sampling_level": joint("loss", "train.objective", "token"),
    "reward_weights": same("env.reward_weights"),
    "multi_objective_aggregation": refused(
        "rewards are summed, and the sum is normalised; leave it out, or give an "
        "estimator of your own as train.advantage_estimator", "sum_then_normalize"),
    "scale_rewards": joint("advantage", "train.advantage_estimator", "group"),
    "loss_type": joint("loss", "train.objective train.aggregation", "dapo"),
    "mask_truncated_completions": same(
        "train.mask_truncated", False,
        "here they leave the counts as well; in TRL's `grpo` a masked row still counts"),
    "sync_ref_model": refused(_REFERENCE, False),
    "ref_model_mixup_alpha": no_effect("it is read with sync_ref_model alone, which is refused",
                                       0.6),
    "ref_model_sync_steps": no_effect("it is read with sync_ref_model alone, which is refused",
                                      512),
    "top_entropy_quantile": joint("entropy", "train.entropy_top_fraction", 1.0),
    "entropy_coef": joint("entropy", _CONTROLLER, 0.0, "the bonus follows the aggregation"),
    "use_adaptive_entropy": joint("entropy", _CONTROLLER, False,
                                  "moves once an iteration, there once an optimizer step"),
    "entropy_coef_min": joint("entropy", "entropy_controller.minimum", 0.0),
    "entropy_coef_max": joint("entropy", "entropy_controller.maximum", 1.0),
    "entropy_coef_delta": joint("entropy", "entropy_controller.step", 0.005),
    "entropy_target": joint("entropy", "entropy_controller.target", 0.2),
    "max_tool_calling_iterations": refused(_TOOLS),
    "vllm_importance_sampling_correction": joint("mismatch", _MISMATCH, True),
    "vllm_importance_sampling_mode": joint("mismatch", _MISMATCH, "sequence_mask"),
    "vllm_importance_sampling_clip_max": joint("mismatch", _MISMATCH, 3.0),
    "vllm_importance_sampling_clip_min": joint("mismatch", _MISMATCH),
    "off_policy_mask_threshold": same("train.off_policy_delta"),
    "use_bias_correction_kl": joint("kl", "train.kl_estimator", True),
    "log_completions": no_effect(_SAMPLES, False),
    "log_multimodal": no_effect("there are no images", True),
    "num_completions_to_print": same("logging.num_samples"),
    "log_unique_prompts": no_effect(_SAMPLES, False),
    "log_completions_hub_repo": no_effect("nothing is uploaded; samples are in samples.jsonl"),
    "use_transformers_continuous_batching": refused(_BATCHING, False),
    "transformers_continuous_batching_config": refused(_BATCHING),
    "use_transformers_paged": refused(_BATCHING, False),
    "vllm_importance_sampling_cap": joint("mismatch", _MISMATCH),
}

_TASK = "env.dataset env.path env.prompt_column"
_NO_HUB = "nothing is uploaded; `hf upload NAME RUN/final_model` does it"
_CODE = "programs run in a sandbox of this machine; write env.reward_options={code: {...}}"
_ADAPTERS = "adapters are LoRA's own; leave it out"
_BITS = "the kinds of `train_model.quantization` have no options; leave it out"

#: Those of ModelConfig and of the scripts: TRL's, and open-r1's with what it adds to GRPOConfig.
SCRIPTS = {
    "model_name_or_path": same("model.name"),
    "model_revision": refused("download that revision, and give its folder as model.name", "main"),
    "dtype": joint("precision", "train_model.torch_dtype", "float32"),
    "attn_implementation": same("train_model.attn_implementation"),
    "use_peft": joint("lora", "train_model.lora.enabled", False),
    "lora_r": joint("lora", "train_model.lora.r", 16),
    "lora_alpha": joint("lora", "train_model.lora.alpha", 32),
    "lora_dropout": joint("lora", "train_model.lora.dropout", 0.05,
                          "TRL's default is not taken: engines have none"),
    "lora_target_modules": joint("lora", "train_model.lora.target_modules", None,
                                 "null and `all-linear`: all of attention and feed-forward"),
    "lora_target_parameters": refused(_ADAPTERS),
    "lora_modules_to_save": refused(_ADAPTERS),
    "lora_task_type": no_effect("models are causal", "CAUSAL_LM"),
    "use_rslora": refused(_ADAPTERS, False),
    "use_dora": refused(_ADAPTERS, False),
    "load_in_8bit": joint("lora", "train_model.quantization", False),
    "load_in_4bit": joint("lora", "train_model.quantization", False),
    "bnb_4bit_quant_type": refused("the four bits are NF4", "nf4"),
    "use_bnb_nested_quant": refused(_BITS, False),
    "bnb_4bit_quant_storage": refused(_BITS),
    "reward_model_name_or_path": refused("reward models are not loaded; ask a server that has "
                                         "one, as env.reward=judge or by a function"),
    "reward_funcs": joint("rewards", "env.reward"),
    "dataset_name": joint("data", _TASK),
    "dataset_config": joint("data", "env.task.config"),
    "dataset_train_split": joint("data", "env.task.train_split", "train"),
    "dataset_test_split": joint("data", "env.task.test_split", "test",
                                "where it is given; else rows of the training split are held out"),
    "dataset_streaming": refused("problems are read whole; leave it out", False),
    "ignore_bias_buffers": no_effect("DistributedDataParallel is not used", False),
    "datasets": joint("data", "env.dataset_mixture", None, "entries as in dataset_mixture"),
    "streaming": refused("problems are read whole; leave it out", False),
    "dataset_mixture": joint("data", "env.dataset_mixture"),
    "test_split_size": joint("data", "env.dataset_mixture"),
    # open-r1
    "dataset_prompt_column": joint("data", "env.prompt_column", "prompt"),
    "benchmarks": same("eval.benchmarks"),
    **{f"cosine_{name}": joint("rewards", "env.reward_options", default)
       for name, default in (("min_value_wrong", 0.0), ("max_value_wrong", -0.5),
                             ("min_value_correct", 0.5), ("max_value_correct", 1.0),
                             ("max_len", 1000))},
    "repetition_n_grams": joint("rewards", "env.reward_options", 3),
    "repetition_max_penalty": joint("rewards", "env.reward_options", -1.0),
    "max_completion_len": joint("rewards", "env.reward_options", 16384),
    "soft_punish_cache": joint("rewards", "env.reward_options", 4096),
    "code_language": refused(_CODE, "python"),
    "code_provider": no_effect(_CODE, "e2b"),
    "code_eval_test_batch_size": no_effect(_CODE, 1),
    "code_eval_scoring_mode": refused(_CODE, "weighted_sum", "pass_fail", "partial"),
    "parallel_code_exec_per_proc": no_effect("env.reward_workers says how many at a time", 2),
    "callbacks": refused("the run evaluates and saves by itself; leave it out", None, []),
    "hub_model_revision": no_effect(_NO_HUB, "main"),
    "overwrite_hub_revision": no_effect(_NO_HUB, False),
    "push_to_hub_revision": no_effect(_NO_HUB, False),
    "wandb_log_unique_prompts": no_effect(_SAMPLES, True),
    "wandb_entity": no_effect("Weights & Biases reads the variable WANDB_ENTITY"),
    "wandb_project": joint("loggers", "logging.wandb_project"),
    "wandb_run_group": joint("loggers", "logging.wandb_group"),
    # earlier versions of TRL, and accelerate
    "max_prompt_length": same("env.max_prompt_tokens", 512,
                              "longer prompts are skipped and counted, there cut"),
    "vllm_max_model_len": same("inference_model.max_model_len"),
    "vllm_device": no_effect("devices are inference_model.devices", "auto"),
    "vllm_dtype": no_effect("the engine has the trainer's dtype", "auto"),
    "torch_dtype": joint("precision", "train_model.torch_dtype", "float32"),
    "num_processes": same("train_model.num_devices", None, "accelerate's name"),
}
