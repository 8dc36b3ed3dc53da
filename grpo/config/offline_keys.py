"""What keys of ``grpo.py`` are called by the offline trainer; light, for a command line is checked
by it before PyTorch is imported."""

from __future__ import annotations

#: Key of ``grpo.py`` -> key of the offline trainer.
KEYS = {
    "model.name": "model.train_id", "ref_model.name": "model.ref_id", "device": "model.device",
    "inference_model.url": "generation.base_url", "inference_model.server": "generation.backend",
    "inference_model.backend": "generation.backend", "inference_model.engine": "generation.backend",
    "inference_model.connections": "generation.batch_size",
    "inference_model.max_num_seqs": "generation.batch_size",
    "inference_model.temperature": "generation.temperature",
    "inference_model.max_tokens": "generation.max_new_tokens",
    "optimizer.lr": "train.lr", "optimizer.clip_grad_norm": "train.grad_clip",
    "train.seed": "seed", "train.max_steps": "iterations",
    "train.optim_batch_size": "train.batch_size",
    "train.gradient_accumulation_steps": "train.grad_accum_steps",
    "train.kl_to_ref_coeff": "train.kl_coef", "train.entropy_coeff": "train.entropy_coef",
    "train.eval_frequency": "eval.interval", "train.objective": "train.ratio",
    "train.aggregation": "train.variant", "train.clip_epsilon": "train.clip_epsilon",
    "train.advantage_estimator": "train.variant",
    "train.advantage_clip_percentile": "train.advantage_clip_percentile",
    "train.checkpoint_frequency": "checkpoint.save_interval",
    "train.keep_checkpoints": "checkpoint.keep_last_k", "train.exp_name": "data.dataset",
    "kl_controller.kind": "train.kl_target", "kl_controller.target": "train.kl_target",
    "kl_controller.horizon": "train.kl_horizon",
    "env.dataset": "data.dataset", "env.data_path": "data.path",
    "env.num_envs": "data.problems_per_iteration", "env.repeats": "data.rollouts_per_problem",
    "env.task.difficulty": "data.difficulty",
    "env.task.train_seed_start": "data.train_seed_start",
    "env.task.num_train_seeds": "data.num_train_seeds",
    "env.task.test_seed_start": "eval.id_seed_start", "env.task.num_test_seeds": "eval.num_ids",
    "env.task.train_start": "data.train_seed_start", "env.task.num_train": "data.num_train_seeds",
    "env.task.test_start": "eval.id_seed_start", "env.task.num_test": "eval.num_ids",
    "eval.samples": "eval.replicates", "eval.batch_size": "eval.batch_size",
    "eval.temperature": "eval.temperature", "eval.k": "eval.k", "eval.seed": "seed",
    "logging.backends": "logging.wandb", "logging.wandb_project": "logging.project",
    "logging.wandb_run_name": "logging.run_name",
}
