"""What the code that brings weights to an engine needs of the engine."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import wait
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

from grpo.system.threads import in_background

if TYPE_CHECKING:
    from vllm import LLM

PauseMode = Literal["keep", "wait", "abort"]
# How often a wait looks whether the engine still lives, in seconds.
_POLL = 0.05


class EngineError(RuntimeError):
    """An engine is dead, failed, or did not answer in time."""


class EngineHandle(Protocol):
    """What weights need of an engine, wherever it runs. ``str(handle)`` names it in errors.

    Every wait ends after ``timeout`` seconds with an error that says what was waited for.
    """

    def collective_rpc(self, method: str, *args: Any, timeout: float) -> list[Any]:
        """Call a method of :mod:`grpo.weights.worker.extension` in every worker."""

    def reset_prefix_cache(self, timeout: float) -> bool:
        """Forget cached keys and values; False while requests still use them."""

    def pause(self, mode: PauseMode = "keep", *, timeout: float) -> None:
        """Stop generating: ``keep`` requests for later, ``wait`` for them, or ``abort`` them."""

    def resume(self, *, timeout: float) -> None:
        """Go on generating."""

    def set_version(self, version: int) -> None:
        """Tell the engine the number of weight updates it has seen."""

    def go_on(self, version: int, *, timeout: float) -> bool:
        """Generate with new weights; False, and still paused, while requests use cached keys and
        values of the old ones."""
        if not self.reset_prefix_cache(timeout=timeout):
            return False
        self.set_version(version)
        self.resume(timeout=timeout)
        return True

    def alive(self) -> bool:
        """Whether the engine can answer."""


class InProcessEngine(EngineHandle):
    """Handle of an ``LLM`` that this process drives; its worker may run in a process of its own.

    Nothing generates outside the caller's own ``generate``, so pausing only deals with requests
    that were added by hand and are unfinished.

    Args:
        llm: from :func:`grpo.policies.inprocess.start_engine`.

    Raises:
        ValueError: if the LLM was started in another way and schedules in another process.

    Examples:
        >>> engine = InProcessEngine(start_engine(path, separate_process=True, device=device,
        ...                                       dtype=dtype, max_model_len=64)) # doctest: +SKIP
        >>> engine.collective_rpc("synchronize", timeout=10.0)                    # doctest: +SKIP
        [None]
    """

    def __init__(self, llm: LLM) -> None:
        self.executor = getattr(llm.llm_engine, "model_executor", None)
        if self.executor is None:
            raise ValueError("this LLM schedules in another process; start it with "
                             "grpo.policies.inprocess.start_engine(separate_process=True)")
        self.llm = llm
        self.version = 0
        # Only executors of other processes have a list of them.
        self.workers = list(getattr(self.executor, "workers", ()))
        self._kept = False
        self._lost: str | None = None

    def __str__(self) -> str:
        model = self.llm.llm_engine.model_config.model
        where = f"worker processes {[w.proc.pid for w in self.workers]}" if self.workers else (
            "in this process")
        return f"vLLM engine of {model} ({where})"

    def collective_rpc(self, method: str, *args: Any, timeout: float) -> list[Any]:
        """Call a worker's method with JSON values.

        Raises:
            EngineError: if the engine is dead, does not answer within ``timeout`` seconds, or the
                method fails; its message is passed on.
        """
        return self._call(method, lambda: self.llm.collective_rpc(
            method, timeout=timeout, args=args), timeout)

    def reset_prefix_cache(self, timeout: float) -> bool:
        """Forget cached keys and values; False while requests run that were not paused.

        Kept requests are computed again with the new weights when they go on.
        """
        return self._call("reset_prefix_cache", lambda: self.llm.reset_prefix_cache(
            reset_running_requests=self._kept), timeout)

    def pause(self, mode: PauseMode = "keep", *, timeout: float) -> None:
        """Deal with unfinished requests.

        Raises:
            EngineError: for ``mode="wait"`` while there are any: only ``generate`` finishes them.
        """
        if mode not in get_args(PauseMode):
            raise ValueError(f"mode={mode!r} is unknown; use one of {get_args(PauseMode)}")
        engine = self.llm.llm_engine
        if mode == "abort":
            unfinished = list(engine.output_processor.request_states)
            self._call("abort", lambda: engine.abort_request(
                unfinished, internal=True), timeout)
        elif mode == "wait" and engine.has_unfinished_requests():
            raise EngineError(f"{self}: requests are unfinished and only generate() finishes them; "
                              "let it return before pausing, or use mode='keep' or 'abort'")
        self._kept = mode == "keep"

    def resume(self, *, timeout: float) -> None:
        """Go on with kept requests."""
        self._kept = False

    def set_version(self, version: int) -> None:
        self.version = version

    def alive(self) -> bool:
        """False once a worker process ended, or an answer was given up on."""
        return (self._lost is None and not getattr(self.executor, "is_failed", False)
                and not getattr(self.executor, "shutting_down", False)
                and all(worker.proc.is_alive() for worker in self.workers))

    def _call(self, what: str, function: Callable[[], Any], timeout: float) -> Any:
        if not self.alive():
            why = self._lost or "its worker process ended"
            raise EngineError(f"{self} is dead: {why}; restart it. The trainer's weights are "
                              "intact")
        if not self.workers:
            return function()
        # A worker that dies may leave the call waiting for ever, so it waits in a thread.
        answer = in_background(function)
        deadline = time.monotonic() + timeout
        while not answer.done() and self.alive() and time.monotonic() < deadline:
            wait([answer], timeout=min(_POLL, timeout))
        error = answer.exception() if answer.done() else None
        # An executor that notices the death of its worker cancels what it was asked.
        if not answer.done() or error is not None and not self.alive():
            # Its answer may still arrive and would be taken for that of a later call.
            self._lost = (f"no answer to {what} within {timeout:g} s" if self.alive() else
                          f"its worker process ended during {what}")
            raise EngineError(f"{self}: {self._lost}; look at its log and restart it. The "
                              "trainer's weights are intact")
        if error is not None:
            raise EngineError(f"{self}: {what} failed: {error}") from error
        return answer.result()
