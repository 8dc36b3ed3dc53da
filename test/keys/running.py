"""Tiny runs of every mode, with real parts where those are cheap.

Model, tokenizer, environment, rewards, loss, optimizer, checkpoints and loggers are real; so is
generation with Transformers. vLLM, servers, other ranks and the Atropos API are stand-ins: what
they would be started with is noted, and Transformers generates in their place.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from grpo.atropos.schemas import ScoredGroup
from grpo.config.schema import load_config
from grpo.report import loggers
from grpo.run import (
    assemble,
    assemble_atropos,
    build_async,
    build_atropos,
    build_engine,
    build_team,
    build_worker,
    start,
    start_atropos,
)
from grpo.run.build_objective import build_learner, build_loss
from grpo.weights import factory
from grpo.weights.fleet import ObjectStoreSync

from ..collectors.asynchronous import LocalPool, LocalRay
from ..run.atropos_trainer import atropos_trainer
from ..training import runs
from .modes import Mode, merged
from .watching import Observation, watched

#: Of which one is neither among the first, nor the last, nor evaluated or saved.
ITERATIONS = 6


class Runner:
    """Runs a mode with some keys changed."""

    def __init__(self, folder: Path, tokenizer: Any) -> None:
        self.folder = folder
        self.names = {name: str(runs.save_tiny(folder / name, tokenizer, seed=seed))
                      for seed, name in enumerate(("model", "teacher", "reference"))}
        self.names["talker"] = str(runs.save_talker(folder / "talker", tokenizer, seed=0))
        self._count = 0

    def values(self, mode: Mode, key: str | None = None, value: Any = None) -> dict[str, Any]:
        """The sections of a run; what is ``{in braces}`` is a model's folder."""
        common = {
            "device": "cpu", "model": {"name": "{model}"},
            "train_model": {"torch_dtype": "float32"},
            "train": {"checkpoint_frequency": 2}, "optimizer": {"lr": 0.01}}
        env = {"task": {"max_operand": 9, "num_train": 20, "num_test": 4},
               "reward": f"{runs.__name__}:by_text"}
        if mode.script == "atropos":
            common["atropos"] = {"steps": ITERATIONS, "seq_len": 12}
            common["train"]["gradient_accumulation_steps"] = 2
            if mode.sections.get("atropos", {}).get("evaluate"):
                common |= {"env": env, "train": common["train"] | {"eval_frequency": 2}}
        elif mode.on_atropos:
            common["env"] = {"num_envs": 2, "repeats": 2}
            common["train"] |= {"max_steps": ITERATIONS}
            common["inference_model"] = {"max_model_len": 24}
        else:
            common["env"] = env | {"num_envs": 2, "repeats": 4}
            common["train"] |= {"total_dialog_turns": ITERATIONS * 8, "eval_frequency": 2}
            common["inference_model"] = {"max_tokens": 5}
        if mode.script == "async":
            common["inference_model"]["num_devices"] = 2
        values = merged(common, mode.sections)
        if key is not None:
            *path, name = key.split(".")
            place = values
            for part in path:
                place[part] = place = dict(place.get(part, {}))
            place[name] = value
        return _filled(values, self.names)

    def __call__(self, mode: Mode, key: str | None = None, value: Any = None) -> Observation:
        """Run it, unless its configuration is refused."""
        config = load_config(self.values(mode, key, value), mode.schema)
        self._count += 1
        folder = self.folder / f"run_{self._count}"
        folder.mkdir()
        with (pytest.MonkeyPatch.context() as patch, ExitStack() as at_end,
              watched(patch, mode.schema) as watch):
            patch.chdir(folder)
            seen = watch.observed
            self._stand_in(patch.setattr, seen, mode, workers=config.has_workers)
            trainer = self._trainer(mode, config, folder, at_end)
            seen.did["model"] = _model(trainer.model)
            seen.did["optimizer"] = _optimizer(trainer.learner.optimizer)
            watch.running = True
            trainer.fit()
            watch.running = False
        shutil.rmtree(trainer.run_dir / "final_model", ignore_errors=True)
        seen.did["files"] = {re.sub(r"\d{6,}.*", "", str(path.relative_to(folder)))
                             for path in folder.rglob("*")}
        rows = [{key: value for key, value in row.items() if not key.startswith(
            ("time", "tokens/per_second"))} for row in loggers.read_jsonl(
                trainer.run_dir / "metrics.jsonl")]
        samples = loggers.read_jsonl(trainer.run_dir / "samples.jsonl")
        # After the first update what a run does depends on who was faster, unless it is stable.
        kept = len(rows) if mode.stable else 2
        for name in set().union(*rows):  # each by itself: one that chance changes hides no other
            seen.did[f"metric {name}"] = [row.get(name) for row in rows[:kept]]
        seen.did["samples"] = samples[: kept if mode.stable else 1]
        seen.did["steps"] = [(row["step"], sorted(row), row.get("train/lr")) for row in rows]
        shutil.rmtree(folder)
        return seen

    def _trainer(self, mode: Mode, config: Any, folder: Path, at_end: ExitStack) -> Any:
        if mode.script == "atropos":
            return at_end.enter_context(atropos_trainer(config))
        build = assemble.assemble if mode.script == "sync" else assemble.assemble_async
        return build(config, folder, None, at_end)

    # -- stand-ins -----------------------------------------------------------------------------

    def _stand_in(self, patch: Any, seen: Observation, mode: Mode, *, workers: bool) -> None:
        patch("grpo.report.reporter.write_report",
              lambda run_dir, *, title, config: seen.note("report", title) or run_dir / "none")
        patch(start, "make_loggers", _noting(seen, "loggers", loggers.make_loggers))
        patch(build_engine, "_with_engine", lambda setup, on_failure: _engine(seen, setup))
        patch(build_engine, "_with_server", lambda setup, on_failure, server: _server(
            seen, setup, server))
        patch(build_team, "_with_ranks", lambda setup, *rest: _ranks(seen, setup))
        if workers:
            LocalRay(SimpleNamespace(setattr=patch))
            patch(build_async, "WorkerPool", _pool(seen))
            patch("ray.remote", lambda cls: SimpleNamespace(
                options=lambda **options: SimpleNamespace(remote=cls)))
            patch(factory, "FleetTransfer", _fleet(seen))
            patch(factory, "FleetLoRA", _fleet(seen))
            patch(build_worker, "_start_engine", _worker_engine(seen, build_worker._start_engine))
        if mode.on_atropos:
            patch(start_atropos, "find_engine", lambda config, **_: seen.note(
                "looked for", (config.atropos.vllm_port, config.atropos.bridge_config)))
            for module, name in ((assemble_atropos, "loading_table"),
                                 (build_atropos, "show_times")):
                patch(module, name, lambda *args, name=name, **options: seen.note(
                    name, "asked for") or "")
            patch(build_atropos, "PortForwarder", lambda ports, url: seen.note(
                "forwarded", (ports, url)) or nullcontext())
            patch(build_atropos, "BatchStream", lambda *args, **options: _Stream(
                seen, *args, **options))
            patch(build_atropos, "VLLMSampler", lambda policy, **_: SimpleNamespace(policy=policy))
            patch(build_atropos, "BridgeDriver", lambda bridge, sampler, **_: SimpleNamespace(
                policy=sampler.policy, advance=lambda timeout: None, drain=lambda timeout: None))
            patch(build_atropos, "BridgeServer", lambda bridge, **options: seen.note(
                "bridge", options) or nullcontext())


def _filled(values: Any, names: dict[str, str]) -> Any:
    if isinstance(values, dict):
        return {key: _filled(value, names) for key, value in values.items()}
    return values.format_map(names) if isinstance(values, str) and "{" in values else values


def _noting(seen: Observation, where: str, function: Any) -> Any:
    def noting(backends, *, run_dir, config, **options):
        seen.note(where, (backends, options))
        wanted = [name for name in backends if name != "wandb"]
        return function(wanted, run_dir=run_dir, config=config)
    return noting


def _engine(seen: Observation, setup: Any) -> Any:
    """What vLLM would be started with; Transformers generates."""
    _note_engine(seen, build_engine.start_engine_of, setup)
    seen.note("weights", setup.config.weight_sync)
    return build_engine._one_module(setup)


def _server(seen: Observation, setup: Any, server: Any) -> Any:
    url = setup.config.inference_model.url
    if url is None:
        options = build_engine.server_options(setup) if server is None else {
            **server.options, "port": server.port, "log": str(server.log_path), **server.env}
        seen.note("server", options)
    seen.note("weights", (url, setup.config.weight_sync))
    seen.note("a batch", setup.config.train.rollout_timeout)
    if setup.config.inference_model.is_stock:
        seen.note("requests", setup.config.inference_model.connections)
    actor = build_engine._one_module(setup)
    actor.policy.client = MagicMock()
    return actor


def _ranks(seen: Observation, setup: Any) -> Any:
    config = setup.config
    seen.note("ranks", config.train_model.ranks)
    actor = _engine(seen, setup)
    loss = build_loss(config, actor.model, setup.tokenizer)
    return build_team.TrainingActor(actor.model, actor.policy, actor.weights,
                                    build_learner(config, loss), loss.scorer)


def _pool(seen: Observation) -> Any:
    class Pool(LocalPool):
        def __init__(self, make: Any, **options: Any) -> None:
            seen.note("workers", options)
            super().__init__(make, **options)
    return Pool


def _model(model: Any) -> Any:
    """What a model is and what of it is trained."""
    modules = [vars(module) for module in model.modules()]
    return (str(model.dtype), model.config._attn_implementation,
            getattr(model, "is_gradient_checkpointing", None),
            [(name, param.shape) for name, param in model.named_parameters()
             if param.requires_grad],
            [module[key] for module in modules for key in ("p", "scaling") if key in module])


def _optimizer(optimizer: Any) -> Any:
    """With what an optimizer steps."""
    return [{key: value for key, value in group.items() if key != "params"}
            for group in optimizer.adamw.param_groups]


def _fleet(seen: Observation) -> Any:
    def fleet(model, pool, *, timeout, **options):
        seen.note("weights", options)
        return ObjectStoreSync(model, pool, timeout=timeout)
    return fleet


class _Started(Exception):
    """An engine would have been started."""


def _note_engine(seen: Observation, start: Any, *given: Any) -> None:
    def noting(path, **options):
        seen.note("engine", options)
        raise _Started

    with pytest.MonkeyPatch.context() as patch, suppress(_Started):
        patch.setattr(build_engine, "start_engine", noting)
        start(*given)


def _worker_engine(seen: Observation, start: Any) -> Any:
    def start_engine(setup, *rest):
        if setup.backend == "vllm":
            _note_engine(seen, start, setup, *rest)
        return start(dataclasses.replace(setup, backend="transformers"), *rest)
    return start_engine


class _Stream:
    """An API that always has groups of two sequences."""

    unreachable, repeated = None, 0

    def __init__(self, seen: Observation, client: Any, registration: Any, **options: Any) -> None:
        seen.note("API", (vars(client), vars(registration)))
        self.seen, self.rejected, self.messages, self._served = seen, {}, {}, 0

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "timeout":
            self.seen.note("wait for groups", value)
        super().__setattr__(name, value)

    def used(self, groups: Any) -> None:
        pass

    def acknowledge(self) -> None:
        pass

    def unacknowledged(self) -> list:
        return []

    def take(self) -> Any:
        self._served += 1
        rows = [[40 + self._served, 50, 60, 70 + row, 80, 90 + row, 33 + row, 44, 55 + row, 66, 77,
                 88, 99 + row] for row in range(2)]
        return SimpleNamespace(groups=[ScoredGroup(
            tokens=rows, masks=[[-100] * 3 + row[3:] for row in rows],
            scores=[float(self._served % 3), 2.0 - self._served % 2],
            inference_logprobs=[[1.0] * 3 + [-5.5 + 0.1 * i for i in range(10)]] * 2,
            generation_params={"temperature": 1.0}, group_uid=str(self._served),
            distill_token_ids=[[[7, 8, 9]] * len(row) for row in rows],
            distill_logprobs=[[[-1.0, -1.5, -2.0]] * len(row) for row in rows])])
