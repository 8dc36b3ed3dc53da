"""Tiny asynchronous runs for the tests, with workers on Ray or as objects of this process."""

from __future__ import annotations

import json
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import ExitStack
from pathlib import Path

from grpo.collectors.reference_worker import ReferenceWorker
from grpo.collectors.rollout_worker import RolloutWorker
from grpo.config.asynchronous import AsyncConfig
from grpo.config.schema import Config, load_config
from grpo.policies.handle import EngineError
from grpo.policies.ray_engine import Call, EngineDied, WorkerPool
from grpo.run import build_async
from grpo.run.assemble import assemble_async
from grpo.run.build_worker import build_worker
from grpo.system.threads import in_background

#: Sections of runs that train adapters, compared with the model without them.
LORA = {"train_model": {"lora": {"enabled": True, "r": 4, "alpha": 8}},
        "train": {"kl_to_ref_coeff": 0.1}}


def _values(folder, **sections) -> dict:
    values = {
        "device": "cpu", "model": {"name": str(folder)},
        "env": {"dataset": "arithmetic", "task": {"max_operand": 9, "num_train": 20, "num_test": 4},
                "num_envs": 4, "repeats": 4, "reward": "negative_length"},
        "train": {"total_dialog_turns": 6 * 16, "eval_frequency": 2, "checkpoint_frequency": 0},
        "inference_model": {"backend": "transformers", "max_tokens": 5},
        "optimizer": {"lr": 0.01}}
    for name, section in sections.items():
        values[name] = values.get(name, {}) | section
    return values


def sync_config(folder, **sections) -> Config:
    return load_config(_values(folder, **sections))


def async_config(folder, *, inference_model: dict | None = None, **sections) -> AsyncConfig:
    values = _values(folder, **sections)
    values["inference_model"] |= {"num_devices": 2} | (inference_model or {})
    return load_config(values, AsyncConfig)


def make_async_trainer(config: AsyncConfig, run_dir: Path, at_end: ExitStack, checkpoint=None):
    """The trainer of ``grpo-async.py``."""
    return assemble_async(config, run_dir, checkpoint, at_end)


def rows_of(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


class LocalPool(WorkerPool):
    """Workers that are objects of this process; each call runs in a thread of its own.

    Attributes:
        killed: objects that answer no more.
        intercept: replaces a method of all workers by name.
    """

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.killed: list = []
        self.intercept: dict = {}

    def kill(self, number: int) -> None:
        self.killed.append(self.actors[number])

    def send(self, number, method, *args):
        actor = self.actors[number]

        def run():
            if actor in self.killed:
                raise EngineDied(f"{self.name(number)} died during {method}: killed")
            result = self.intercept.get(method, getattr(actor, method))(*args)
            if actor in self.killed:
                raise EngineDied(f"{self.name(number)} died during {method}: killed")
            return result

        return Call(number, self.lives[number], method, in_background(run))

    def wait(self, calls, *, timeout):
        done, _ = wait([call.ref for call in calls], timeout, FIRST_COMPLETED)
        return [call for call in calls if call.ref in done]

    def result(self, call, *, timeout):
        try:
            return call.ref.result(timeout)
        except EngineDied as error:
            self.bury(call, str(error))
            raise
        except Exception as error:
            raise EngineError(f"{self.name(call.number)}: {call.method} failed: {error!r}") from (
                error)

    def put(self, value):
        return value

    def _end(self, actor) -> None:
        self.killed.append(actor)
        if isinstance(actor, RolloutWorker):
            actor.close()


class LocalRay:
    """Lets :mod:`grpo.run.build_async` build runs whose workers are objects of this process."""

    def __init__(self, monkeypatch) -> None:
        monkeypatch.setattr(build_async, "WorkerPool", LocalPool)
        monkeypatch.setattr(build_async, "start_own_ray", lambda plan: lambda: None)
        monkeypatch.setattr(build_async, "_make_worker", self._make_worker)
        monkeypatch.setattr(build_async, "_make_reference", self._make_reference)

    @staticmethod
    def _make_worker(setup, prompts, places, backend):
        worker = build_async.worker_setup(setup, prompts, places, backend)
        return lambda number: RolloutWorker(build_worker, worker, number,
                                            prompts.train if prompts else [])

    @staticmethod
    def _make_reference(build, path, places):
        return lambda number: ReferenceWorker(build, path)
