"""A rollout worker as a Ray actor, whose process imports what it needs before anybody knows what it
will do.

Needs neither PyTorch nor Ray to be imported, so that a command can start workers before it loads
its own libraries (:mod:`grpo.run.ahead`).
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpo.collectors.rollout_worker import RolloutWorker

# Threads of a worker: one reports groups, the others take them and bring weights, or sample for
# the trainer while groups are sampled.
_THREADS = {"report": 1, "control": 4, "sample": 2}
#: What is asked of a :class:`~grpo.collectors.rollout_worker.RolloutWorker` through Ray, and in
#: which of its threads.
CALLS = {"finished": "report", "generate": "sample", **dict.fromkeys((
    "describe", "submit", "cancel", "collective_rpc", "pause", "resume", "reset_prefix_cache",
    "set_version", "go_on", "load_adapter", "differing_adapter", "load_state", "fingerprints"),
    "control")}


class WorkerActor:
    """Import first, become a worker later; calls wait until it is one.

    Args:
        prepare: imports what the worker will need, in its process.
    """

    def __init__(self, prepare: Callable[[], None]) -> None:
        self._worker: Future[RolloutWorker] = Future()
        prepare()

    def build(self, *args: Any) -> None:
        """Become the worker of these arguments of
        :class:`~grpo.collectors.rollout_worker.RolloutWorker`; all calls raise what is raised
        here."""
        from grpo.collectors.rollout_worker import RolloutWorker

        try:
            self._worker.set_result(RolloutWorker(*args))
        except BaseException as error:
            traceback.print_exc()  # in the worker's log, for nobody waits for this call
            self._worker.set_exception(error)


def start_worker(options: dict[str, Any], prepare: Callable[[], None], *,
                 asked_at_a_time: int = 0) -> Any:
    """Start an actor; returns Ray's handle of it.

    Args:
        options: of Ray, such as where it is started.
        prepare: see :class:`WorkerActor`; Ray sends it.
        asked_at_a_time: requests of others that wait for their rows, each in a thread.
    """
    import ray

    threads = _THREADS | {"sample": _THREADS["sample"] + asked_at_a_time}
    members = {name: ray.method(concurrency_group=group)(_handed_on(name))
               for name, group in CALLS.items()}
    members["build"] = ray.method(concurrency_group="control")(WorkerActor.build)
    # Ray shows this name to whoever looks for the workers among the processes.
    named = type("RolloutWorker", (WorkerActor,), members)
    actor_class = ray.remote(max_concurrency=1, concurrency_groups=threads)(named)
    return actor_class.options(**options).remote(prepare)


def _handed_on(name: str) -> Callable[..., Any]:
    def call(self: WorkerActor, *args: Any) -> Any:
        return getattr(self._worker.result(), name)(*args)

    return call
