"""One thread that steps an engine, so that requests, pauses and weight updates cannot collide.

Engines in this process are not safe to be used by several threads. Here one thread owns the engine:
jobs join it between two steps (continuous batching), and so does everything else that touches it,
such as receiving weights. Tokens are dated when the weights change: at that moment the number of
tokens that each running row has is known.

    driver = EngineDriver(VLLMSampler(policy, seeded=False))    # of grpo.policies.samplers
    completions = driver.submit(Job(prompts, sampling)).result(timeout=60)
    driver.call(lambda: engine.collective_rpc(...), timeout=60)
    driver.close()
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from grpo.policies.base import Completions, Sampling
from grpo.policies.handle import EngineError


@dataclass(frozen=True, eq=False)
class Job:
    """Rows that are sampled and handed back together.

    Random numbers are those of rows ``first``, ``first + 1``, ... of a policy's call number
    ``call`` with ``of`` rows: a batch may be divided over engines without changing what is drawn.
    """

    prompts: list[list[int]]  # token ids
    sampling: Sampling
    call: int = 0
    first: int = 0
    of: int | None = None  # None: the rows given here are all
    seeded: bool = False  # rows draw from these numbers also where engines draw at will
    #: For vLLM, a ``SamplingParams`` that takes the place of ``sampling``. As it may ask for
    #: log-probs of further tokens, those of its rows are given as vLLM's flat log-probs.
    params: Any = None
    goes_on: bool = False  # a conversation that has begun, which is not held back between turns


class Sampler(Protocol):
    """What the driver needs of an engine; not safe for use from several threads."""

    policy: Any  # whose engine or model it is
    tokens: int  # sampled so far
    version: int  # of the tokens that are sampled now

    def add(self, job: Job) -> None:
        """Start a job at the next step."""

    def drop(self, job: Job) -> None:
        """Forget a job."""

    def step(self) -> list[tuple[Job, Completions]]:
        """Work a little; the jobs that are finished."""

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""

    def set_version(self, version: int) -> None:
        """Tokens sampled from now on have this version."""

    def close(self) -> None:
        """End the engine."""


class EngineDriver:
    """The thread that owns an engine.

    Args:
        sampler: the engine; used by nobody else.
    """

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler
        self.busy = 0.0  # seconds spent in steps so far
        # What the thread is to do, with the future of who waits for it, if anybody does.
        self._inbox: queue.SimpleQueue[tuple[Callable[[], Any], Future | None]] = (
            queue.SimpleQueue())
        self._entry = threading.Lock()  # nothing comes into the inbox of an engine that has ended
        self._paused = self._closed = False
        self._failure: BaseException | None = None
        self._open: dict[Job, Future] = {}
        self._held: dict[Job, Future] | None = None  # what comes while the open ones are finished
        self._thread = threading.Thread(target=self._run, daemon=True, name="engine-driver")
        self._thread.start()

    def submit(self, job: Job) -> Future:
        """Start a job; its future gets the :class:`~grpo.policies.base.Completions`."""
        future: Future = Future()
        self._put(lambda: self._add(job, future), future)
        return future

    def cancel(self, job: Job) -> None:
        """Give up on a job; its future is cancelled."""
        self._inbox.put((lambda: self._drop(job), None))

    def call(self, function: Callable[[], Any], *, timeout: float, what: str = "a call") -> Any:
        """Run ``function`` between two steps.

        Raises:
            EngineError: if it has not returned after ``timeout`` seconds, or the engine fails or is
                closed before.
        """
        answer: Future = Future()

        def run() -> None:
            if not answer.set_running_or_notify_cancel():
                return
            try:
                answer.set_result(function())
            except Exception as error:
                answer.set_exception(error)

        self._put(run, answer)
        try:
            return answer.result(timeout)
        except CancelledError:
            if not answer.cancelled():  # the function's own
                raise
            raise EngineError("the engine was closed") from None
        except TimeoutError:
            if answer.done():  # the function's own
                raise
            answer.cancel()
            raise EngineError(f"the engine did not get to {what} within {timeout:g} s; its last "
                              "step takes longer than that, or hangs") from None

    def pause(self, *, timeout: float) -> None:
        """Step no more; returns when the last step is over. Requests are kept."""
        self.call(lambda: self._set_paused(True), timeout=timeout, what="pause")

    def resume(self, *, timeout: float) -> None:
        """Go on stepping, also with what :meth:`drain` has held back."""
        self.call(self._go_on, timeout=timeout, what="resume")

    def drain(self, *, timeout: float,
              over: Callable[[Collection[Job]], bool] = lambda held: True) -> None:
        """Wait until all jobs are finished; those that come meanwhile wait for :meth:`resume`,
        except for those that go on.

        Args:
            timeout: seconds.
            over: whether none will go on, given the jobs that wait.

        Raises:
            EngineError: at the deadline; the engine then works on as before.
        """
        deadline = time.monotonic() + timeout
        self.call(self._hold, timeout=timeout, what="finish its requests")
        while self.call(lambda: self._open or not over(self._held), timeout=timeout,
                        what="finish its requests"):
            if time.monotonic() > deadline:
                self.resume(timeout=timeout)
                raise EngineError(f"the engine did not finish its requests within {timeout:g} s; "
                                  "pause with mode='keep' or 'abort'")
            time.sleep(0.01)

    def abort(self, *, timeout: float) -> None:
        """Cancel all jobs."""
        self.call(lambda: [self._drop(job) for job in (*self._open, *(self._held or ()))],
                  timeout=timeout, what="abort its requests")

    def alive(self) -> bool:
        """Whether the thread runs and no step has failed."""
        return self._failure is None and self._thread.is_alive() and not self._closed

    @property
    def failure(self) -> str | None:
        """What a step failed with, after which nothing is generated any more."""
        return None if self._failure is None else repr(self._failure)

    def close(self) -> None:
        """End thread and engine; jobs that are not finished are cancelled."""
        if self._closed:
            return
        with self._entry:
            self._closed = True
            self._inbox.put((lambda: None, None))
        self._thread.join(timeout=30.0)
        # Or those who wait for them would wait for ever, and Python for their threads at its end.
        for future in (*self._open.values(), *(self._held or {}).values(), *self._left()):
            future.cancel()
        self.sampler.close()

    # -- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        # PyTorch gives a thread its share of the cores when it first asks. vLLM for CPUs counts
        # them before that, and refuses to go on with another number.
        torch.get_num_threads()
        try:
            while not self._closed:
                self._work()
        except Exception as error:  # handed to all who wait for the engine
            self._fail(error)

    def _work(self) -> None:
        """Do what was asked for, and one step."""
        if self._paused or self.sampler.idle:
            self._inbox.get()[0]()  # nothing to do before somebody asks for something
        while not self._inbox.empty():
            self._inbox.get()[0]()
        if self._closed or self._paused or self.sampler.idle:
            return
        start = time.perf_counter()
        finished = self.sampler.step()
        self.busy += time.perf_counter() - start
        for job, completions in finished:
            self._open.pop(job).set_result(completions)

    def _put(self, function: Callable[[], Any], waits: Future) -> None:
        with self._entry:
            if not self.alive():
                raise EngineError(f"the engine is dead: {self._failure!r}" if self._failure else
                                  "the engine was closed")
            self._inbox.put((function, waits))

    def _left(self) -> list[Future]:
        """Of those who wait for what came too late for the thread."""
        left = []
        with contextlib.suppress(queue.Empty):
            while True:
                left.append(self._inbox.get_nowait()[1])
        return [future for future in left if future is not None]

    def _add(self, job: Job, future: Future) -> None:
        if self._held is not None and not job.goes_on:
            self._held[job] = future
            return
        try:
            self.sampler.add(job)
        except Exception as error:  # a request that the engine refuses; it goes on with others
            future.set_exception(error)
        else:
            self._open[job] = future

    def _drop(self, job: Job) -> None:
        if self._held and (held := self._held.pop(job, None)):
            held.cancel()
        future = self._open.pop(job, None)
        if future is not None:
            self.sampler.drop(job)
            future.cancel()

    def _fail(self, error: Exception) -> None:
        with self._entry:
            self._failure = error
        # What came during the step that failed would wait for one that is never made.
        for future in (*self._open.values(), *(self._held or {}).values(), *self._left()):
            if future.set_running_or_notify_cancel():
                future.set_exception(EngineError(f"the engine failed: {error!r}"))
        self._open, self._held = {}, None

    def _set_paused(self, paused: bool) -> None:
        self._paused = paused

    def _hold(self) -> None:
        self._held = {} if self._held is None else self._held

    def _go_on(self) -> None:
        self._paused, held, self._held = False, self._held, None
        for job, future in (held or {}).items():
            self._add(job, future)
