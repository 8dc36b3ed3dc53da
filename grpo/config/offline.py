"""The offline trainer's configuration, and what it is in the keys of ``grpo.py``.

A translation, not a second trainer: :func:`translate` makes the :class:`~grpo.config.schema.Config`
that the one composer takes. ``docs/offline.md`` explains the keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from grpo.config.keys import ConfigError
from grpo.config.offline_keys import KEYS
from grpo.config.schema import Config, load_config
from grpo.config.section import Section
from grpo.config.unread import Unread, only_with, refuse_unread, typed

#: Backend -> ``inference_model.server`` of one at ``base_url``.
_SERVERS = {"vllm_server": "vllm", "sglang_server": "sglang", "grpo_server": "own"}
_NEUTRAL = {"top_p": (1.0,), "top_k": (-1, 0), "repetition_penalty": (1.0,)}
_AGGREGATION = {"grpo": "sequence", "bnpo": "token", "dapo": "token", "dr_grpo": "dr_grpo"}
_DAPO_CLIP, _HORIZON, _ITERATIONS = (0.2, 0.28), 10.0, 10

_SERVED = Unread(lambda c: c.generation.backend not in _SERVERS, "by generation.backend="
                 "{generation.backend}; use a server, or")
_AT_A_TIME = Unread(lambda c: c.generation.backend in ("grpo_server", "transformers"),
                    "by generation.backend={generation.backend}, which has all of a batch in one "
                    "call;")
_SAT = Unread(lambda c: c.data.dataset != "sat", "by data.dataset={data.dataset};")
_GSM8K = Unread(lambda c: c.data.dataset != "gsm8k", "by data.dataset={data.dataset};")
_REFERENCE = Unread(lambda c: not c.train.kl_coef, "because train.kl_coef is 0; raise that, or")
_SAMPLED = Unread(lambda c: not c.eval.do_sample, "because eval.do_sample=false; set it to true, "
                  "or")
_EVALUATED = Unread(lambda c: not c.eval.enabled, "because eval.enabled=false; set it to true, or")
_WANDB = only_with("logging.wandb", "set that to true")
#: What became of the earlier trainer's own defaults.
CHANGED = ("generation.top_p=1, top_k=-1 and repetition_penalty=1, where the earlier trainer had "
           "0.95, 50 and 1.1: those sample from another distribution than the one that is trained")


class OfflineModel(Section):
    """What is trained, and where."""

    train_id: str = "embedded"
    ref_id: Annotated[str | None, _REFERENCE] = None
    """null: the model the run starts from."""
    device: Literal["auto", "cpu", "cuda"] = "auto"


class Generation(Section):
    """Who generates, and how."""

    backend: Literal["vllm_server", "sglang_server", "grpo_server", "vllm",
                     "transformers"] = "vllm_server"
    """A server at ``base_url``: of vLLM, of SGLang, of this library; or in this process."""
    base_url: Annotated[str, _SERVED] = "http://127.0.0.1:8000"
    """With or without ``/v1``."""
    batch_size: Annotated[int, _AT_A_TIME] = Field(4, ge=1)
    """Completions at a time."""
    max_new_tokens: int = Field(256, ge=1)
    temperature: float = Field(0.7, gt=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(-1, ge=-1)
    repetition_penalty: float = Field(1.0, gt=0)

    @model_validator(mode="after")
    def _samples_what_is_trained(self) -> Generation:
        for name, neutral in _NEUTRAL.items():
            if (value := getattr(self, name)) not in neutral:
                raise ValueError(
                    f"generation.{name}={value} samples from another distribution than the "
                    "softmax that is trained: tokens that it cuts off or reweighs have log-probs "
                    "that the trainer does not compute, and every ratio would be biased. Leave it "
                    f"out ({neutral[0]:g}), and sharpen samples with generation.temperature")
        return self


class OfflineTrain(Section):
    """How gradients are made."""

    iterations: int | None = Field(None, ge=1)
    """The same as ``iterations`` at the top."""
    batch_size: int = Field(8, ge=1)
    """Completions a backward pass."""
    grad_accum_steps: int = Field(1, ge=1)
    """Of those an optimizer step."""
    lr: float = Field(1e-5, gt=0)
    grad_clip: float | None = Field(1.0, gt=0)
    kl_coef: float = Field(0.05, ge=0)
    kl_target: Annotated[float | None, only_with("train.kl_coef")] = Field(None, gt=0)
    """Nats a token that ``kl_coef`` is adapted to; null: it stays."""
    kl_horizon: Annotated[float | None, only_with("train.kl_target")] = Field(None, gt=0)
    """Iterations in which it follows; null: 10."""
    entropy_coef: float = Field(0.0, ge=0)
    clip_epsilon: float | tuple[float, float] | None = None
    variant: Literal["grpo", "bnpo", "dr_grpo", "dapo"] = "grpo"
    """What a token's loss is divided by: the length of its completion, the tokens of the batch
    (``bnpo``, ``dapo``), or a constant."""
    ratio: Literal["token", "sequence"] = "token"
    """Of a token, or of a whole completion (GSPO)."""
    advantage_clip_percentile: float | None = Field(None, gt=0, lt=50)

    @property
    def step_rows(self) -> int:
        """Completions of an optimizer step, if there are as many."""
        return self.batch_size * self.grad_accum_steps


class OfflineData(Section):
    """Problems, each from a seed of its own."""

    dataset: Literal["sat", "countdown", "gsm8k"] = "sat"
    path: Annotated[str | None, _GSM8K] = None
    difficulty: Annotated[int | None, _SAT] = None
    problems_per_iteration: int = Field(4, ge=1)
    rollouts_per_problem: int = Field(4, ge=2)
    train_seed_start: int = Field(1000, ge=0)
    num_train_seeds: int = Field(64, ge=1)

    @property
    def rows(self) -> int:
        """Completions of an iteration."""
        return self.problems_per_iteration * self.rollouts_per_problem


class OfflineEval(Section):
    """Evaluations, of the same problems with the same random numbers each time."""

    enabled: bool = True
    interval: Annotated[int, _EVALUATED] = Field(1, ge=1)
    backend: Annotated[str | None, _EVALUATED] = None
    base_url: Annotated[str | None, _EVALUATED] = None
    batch_size: Annotated[int, _EVALUATED] = Field(8, ge=1)
    replicates: Annotated[int, _SAMPLED, _EVALUATED] = Field(4, ge=1)
    num_ids: int = Field(16, ge=1)
    id_seed_start: int = Field(5000, ge=0)
    do_sample: Annotated[bool, _EVALUATED] = True
    temperature: Annotated[float | None, _SAMPLED, _EVALUATED] = Field(None, gt=0)
    k: Annotated[list[int] | None, _SAMPLED, _EVALUATED] = None


class OfflineCheckpoint(Section):
    save_interval: int = Field(5, ge=0)
    keep_last_k: Annotated[int, only_with("checkpoint.save_interval", "raise that")] = Field(
        3, ge=1)


class OfflineLogging(Section):
    wandb: bool = False
    project: Annotated[str | None, _WANDB] = None
    run_name: Annotated[str | None, _WANDB] = None


class OfflineConfig(Section):
    """A run of the offline trainer."""

    iterations: int | None = Field(None, ge=1)
    """Rounds of generating, training and publishing; null: ``train.iterations``, or 10."""
    seed: int = Field(42, ge=0, lt=2**32)
    resume: str | None = None
    model: OfflineModel = Field(default_factory=OfflineModel)
    generation: Generation = Field(default_factory=Generation)
    train: OfflineTrain = Field(default_factory=OfflineTrain)
    data: OfflineData = Field(default_factory=OfflineData)
    eval: OfflineEval = Field(default_factory=OfflineEval)
    checkpoint: OfflineCheckpoint = Field(default_factory=OfflineCheckpoint)
    logging: OfflineLogging = Field(default_factory=OfflineLogging)
    run: dict[str, Any] = Field(default_factory=dict)
    """Any other key of ``grpo.py``, by section."""

    @model_validator(mode="after")
    def _keys_are_read(self) -> OfflineConfig:
        refuse_unread(self, ())
        return self

    @model_validator(mode="after")
    def _one_length(self) -> OfflineConfig:
        given = {self.iterations, self.train.iterations} - {None}
        if len(given) > 1:
            raise ValueError(f"iterations={self.iterations} and train.iterations="
                             f"{self.train.iterations} are the same setting; give one")
        return self

    @model_validator(mode="after")
    def _steps_fit_the_iteration(self) -> OfflineConfig:
        rows, step = self.data.rows, self.train.step_rows
        if step < rows and rows % step:
            raise ValueError(f"train.batch_size={self.train.batch_size} times train."
                             f"grad_accum_steps={self.train.grad_accum_steps} must divide the "
                             f"{rows} completions of an iteration (data.problems_per_iteration * "
                             "data.rollouts_per_problem)")
        return self

    @model_validator(mode="after")
    def _evaluated_where_the_weights_are(self) -> OfflineConfig:
        for name in ("backend", "base_url"):
            asked, there = getattr(self.eval, name), getattr(self.generation, name)
            if asked is not None and _address(asked) != _address(there):
                raise ValueError(f"eval.{name}={asked} is another engine than generation.{name}="
                                 f"{there}, which alone gets the trained weights; leave it out")
        return self

    @model_validator(mode="after")
    def _one_objective(self) -> OfflineConfig:
        if self.train.ratio == "sequence" and self.train.variant != "grpo":
            raise ValueError(f"train.variant={self.train.variant} divides by tokens, but train."
                             "ratio=sequence has one ratio a completion; use variant=grpo")
        return self


def _address(text: str) -> str:
    """A base address as ``http://host:port``."""
    return text.rstrip("/").removesuffix("/v1")


def notes(offline: OfflineConfig) -> Iterator[str]:
    """Lines that say what is otherwise than somebody may expect."""
    yield CHANGED
    rows, train = offline.data.rows, offline.train
    if train.step_rows > rows:
        yield (f"train.batch_size={train.batch_size} times grad_accum_steps="
               f"{train.grad_accum_steps} is more than the {rows} completions of an iteration: "
               "one step takes all of them")


def translate(offline: OfflineConfig) -> Config:
    """The same run as ``grpo.py`` knows it.

    Raises:
        ConfigError: for what no run can be, and for a key of ``run`` that one of the offline
            trainer's stands for, in its words.

    Examples:
        >>> config = translate(OfflineConfig(train={"lr": 1e-6}))
        >>> config.optimizer.lr, config.inference_model.temperature, config.turns_per_batch
        (1e-06, 0.7, 16)
    """
    values = _values(offline)
    for section, keys in offline.run.items():
        if not isinstance(keys, Mapping) or section not in Config.model_fields:
            raise ConfigError(f"run.{section}: has no keys of grpo.py; write run.SECTION.KEY, "
                              "such as run.train_model.lora.enabled=true")
        _add(values.setdefault(section, {}), keys, section)
    try:
        return load_config(values)
    except ConfigError as error:
        raise ConfigError(in_offline_keys(str(error))) from None


def _add(held: dict[str, Any], keys: Mapping[str, Any], path: str) -> None:
    """Add keys of a section, of which none may be there."""
    for key, value in keys.items():
        if isinstance(held.get(key), dict) and isinstance(value, Mapping):  # env.task
            _add(held[key], value, f"{path}.{key}")
        elif key in held:
            raise ConfigError(f"run.{path}.{key}={typed(value)}: the offline trainer has a key for "
                              f"that, {in_offline_keys(f'{path}.{key}')}; give that")
        else:
            held[key] = value


def _values(offline: OfflineConfig) -> dict[str, Any]:
    model, data, train = offline.model, offline.data, offline.train
    evaluated, checkpoint = offline.eval, offline.checkpoint
    rows = min(train.step_rows, data.rows)
    reference = model.ref_id if model.ref_id != model.train_id else None
    values: dict[str, Any] = {
        "device": model.device, "resume": offline.resume,
        "model": {"name": model.train_id},
        "ref_model": {} if reference is None else {"name": reference},
        "env": {"dataset": data.dataset, "num_envs": data.problems_per_iteration,
                "repeats": data.rollouts_per_problem, **_problems(offline)},
        "train": {
            "exp_name": f"offline_{data.dataset}", "seed": offline.seed,
            "max_steps": train.iterations or offline.iterations or _ITERATIONS,
            "optim_batch_size": rows,
            "gradient_accumulation_steps": -(-rows // train.batch_size),
            "kl_to_ref_coeff": train.kl_coef or None,
            "entropy_coeff": train.entropy_coef or None,
            "eval_frequency": evaluated.interval if evaluated.enabled else "never",
            "checkpoint_frequency": checkpoint.save_interval,
            "keep_checkpoints": checkpoint.keep_last_k if checkpoint.save_interval else None,
            **_objective(train)},
        "optimizer": {"lr": train.lr, "clip_grad_norm": train.grad_clip},
        "inference_model": {"temperature": offline.generation.temperature,
                            "max_tokens": offline.generation.max_new_tokens,
                            **_engine(offline.generation)},
        "logging": {"backends": ["wandb"], "wandb_project": offline.logging.project,
                    "wandb_run_name": offline.logging.run_name} if offline.logging.wandb else {},
        "kl_controller": {} if train.kl_target is None else {
            "kind": "horizon", "target": train.kl_target, "horizon": train.kl_horizon or _HORIZON}}
    if evaluated.enabled:
        values["eval"] = {"batch_size": evaluated.batch_size}
        if evaluated.do_sample:
            values["eval"] |= {
                "samples": evaluated.replicates, "seed": offline.seed, "k": evaluated.k,
                "temperature": evaluated.temperature or offline.generation.temperature}
    return values


def _problems(offline: OfflineConfig) -> dict[str, Any]:
    """What of section ``env`` says which problems there are."""
    data, held_out = offline.data, offline.eval
    if data.dataset == "gsm8k":
        return {"data_path": data.path, "task": {
            "train_start": data.train_seed_start, "num_train": data.num_train_seeds,
            "test_start": held_out.id_seed_start, "num_test": held_out.num_ids}}
    task = {"train_seed_start": data.train_seed_start, "num_train_seeds": data.num_train_seeds,
            "test_seed_start": held_out.id_seed_start, "num_test_seeds": held_out.num_ids}
    return {"task": task | ({} if data.difficulty is None else {"difficulty": data.difficulty})}


def _objective(train: OfflineTrain) -> dict[str, Any]:
    clip = _DAPO_CLIP if train.variant == "dapo" and train.clip_epsilon is None else (
        train.clip_epsilon)
    return {"objective": "gspo" if train.ratio == "sequence" else "ppo_clip",
            "aggregation": _AGGREGATION[train.variant], "clip_epsilon": clip,
            "advantage_estimator": "group_mean" if train.variant == "dr_grpo" else None,
            "advantage_clip_percentile": train.advantage_clip_percentile}


def _engine(generation: Generation) -> dict[str, Any]:
    """Where completions come from."""
    if generation.backend == "transformers":
        return {"backend": "transformers"}
    if generation.backend == "vllm":
        return {"backend": "vllm", "max_num_seqs": generation.batch_size}
    server = _SERVERS[generation.backend]
    at_a_time = {} if server == "own" else {"connections": generation.batch_size}
    return {"backend": "vllm", "engine": "server", "server": server,
            "url": _address(generation.base_url), **at_a_time}


_SECTIONS = "|".join(name for name, field in Config.model_fields.items()
                     if hasattr(field.annotation, "given"))
_A_KEY = re.compile(rf"(?<![\w./])(?:(?:{_SECTIONS})\.[a-z]\w*(?:\.[a-z]\w*)*|device(?==))")


def in_offline_keys(message: str) -> str:
    """A message about keys of ``grpo.py`` with those of the offline trainer.

    Examples:
        >>> in_offline_keys("optimizer.lr=2 is odd; set train_model.lora.enabled=true")
        'train.lr=2 is odd; set run.train_model.lora.enabled=true'
    """
    return _A_KEY.sub(lambda found: KEYS.get(found[0], f"run.{found[0]}"), message)
