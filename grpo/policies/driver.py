"""One thread that steps an engine, so that requests, pauses and weight updates cannot collide.

Engines in this process are not safe to be used by several threads. Here one thread owns the engine:
jobs join it between two steps (continuous batching), and so does everything else that touches it,
such as receiving weights. Tokens are dated when the weights change: at that moment the number of
tokens that each running row has is known.

    driver = EngineDriver(VLLMSampler(policy))
    completions = driver.submit(Job(prompts, sampling)).result(timeout=60)
    driver.call(lambda: engine.collective_rpc(...), timeout=60)
    driver.close()
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from grpo.policies.base import Completions, Sampling, own_random_numbers
from grpo.policies.collect import Collector, collecting, responses_alone
from grpo.policies.handle import EngineError
from grpo.policies.spans import Spans, spans_of
from grpo.policies.transformers import TransformersPolicy
from grpo.policies.vllm import VLLMPolicy


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
    #: For vLLM, a ``SamplingParams`` that takes the place of ``sampling``. As it may ask for
    #: log-probs of further tokens, those of its rows are given as vLLM's flat log-probs.
    params: Any = None


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
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._paused = self._closed = False
        self._failure: BaseException | None = None
        self._open: dict[Job, Future] = {}
        self._held: dict[Job, Future] | None = None  # what comes while the open ones are finished
        self._thread = threading.Thread(target=self._run, daemon=True, name="engine-driver")
        self._thread.start()

    def submit(self, job: Job) -> Future:
        """Start a job; its future gets the :class:`~grpo.policies.base.Completions`."""
        self._refuse_dead()
        future: Future = Future()
        self._inbox.put(lambda: self._add(job, future))
        return future

    def cancel(self, job: Job) -> None:
        """Give up on a job; its future is cancelled."""
        self._inbox.put(lambda: self._drop(job))

    def call(self, function: Callable[[], Any], *, timeout: float, what: str = "a call") -> Any:
        """Run ``function`` between two steps.

        Raises:
            EngineError: if it has not returned after ``timeout`` seconds.
        """
        self._refuse_dead()
        answer: Future = Future()

        def run() -> None:
            if not answer.set_running_or_notify_cancel():
                return
            try:
                answer.set_result(function())
            except Exception as error:
                answer.set_exception(error)

        self._inbox.put(run)
        try:
            return answer.result(timeout)
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

    def drain(self, *, timeout: float) -> None:
        """Wait until all jobs are finished; those that come meanwhile wait for :meth:`resume`.

        Raises:
            EngineError: at the deadline; the engine then works on as before.
        """
        deadline = time.monotonic() + timeout
        self.call(self._hold, timeout=timeout, what="finish its requests")
        while self.call(lambda: len(self._open), timeout=timeout, what="finish its requests"):
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
        """End thread and engine."""
        if self._closed:
            return
        self._closed = True
        self._inbox.put(lambda: None)
        self._thread.join(timeout=30.0)
        self.sampler.close()

    # -- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        # PyTorch gives a thread its share of the cores when it first asks. vLLM for CPUs counts
        # them before that, and refuses to go on with another number.
        torch.get_num_threads()
        while not self._closed:
            if self._paused or self.sampler.idle:
                self._inbox.get()()  # nothing to do before somebody asks for something
            while not self._inbox.empty():
                self._inbox.get()()
            if self._closed or self._paused or self.sampler.idle:
                continue
            start = time.perf_counter()
            try:
                finished = self.sampler.step()
            except Exception as error:  # handed to all who wait for the engine
                self._fail(error)
                return
            self.busy += time.perf_counter() - start
            for job, completions in finished:
                self._open.pop(job).set_result(completions)

    def _add(self, job: Job, future: Future) -> None:
        if self._held is not None:
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
        self._failure = error
        for future in (*self._open.values(), *(self._held or {}).values()):
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

    def _refuse_dead(self) -> None:
        if not self.alive():
            raise EngineError(f"the engine is dead: {self._failure!r}" if self._failure else
                              "the engine was closed")


@dataclass(eq=False)
class _Row:
    job: Job
    number: int
    cuts: list[tuple[int, int]] = field(default_factory=list)  # see grpo.policies.spans.Cuts


class VLLMSampler:
    """Drives the in-process engine of a :class:`~grpo.policies.vllm.VLLMPolicy`.

    Args:
        policy: whose engine, adapter and end tokens are used.
        seeded: draw each row from random numbers of its own, so that a run can be repeated; costs
            time on a GPU.
        version: of the weights.
    """

    def __init__(self, policy: VLLMPolicy, *, seeded: bool, version: int = 0) -> None:
        self.policy, self.seeded, self.version = policy, seeded, version
        self.engine = policy.engine.llm_engine
        self.tokens = 0
        self._rows: dict[str, _Row] = {}
        self._answers: dict[Job, list[tuple | None]] = {}
        self._ids = itertools.count()
        # While there are rows, where the engine is one that they can be collected from at less cost
        self._collector: Collector | None = None
        self._collecting = ExitStack()

    @property
    def idle(self) -> bool:
        return not self._rows

    def add(self, job: Job) -> None:
        if not self._rows:
            self._begin(job.sampling)
        self._answers[job] = [None] * len(job.prompts)
        try:
            for number, prompt in enumerate(job.prompts):
                self._add_row(job, number, prompt)
        except Exception:  # the engine refuses a row; those before it go, too
            self.drop(job)
            raise

    def _add_row(self, job: Job, number: int, prompt: list[int]) -> None:
        seed = job.sampling.row_seed(job.call, job.first + number) if self.seeded else None
        params = job.params or self.policy.sampling_params(job.sampling, seed=seed, final_only=True)
        id = f"row-{next(self._ids)}"
        self.engine.add_request(id, {"prompt_token_ids": prompt}, params,
                                lora_request=self.policy.lora_request)
        self._rows[id] = _Row(job, number)
        if job.params and self._collector:
            self._collector.others.add(id)

    def drop(self, job: Job) -> None:
        ids = [id for id, row in self._rows.items() if row.job is job]
        self.engine.abort_request(ids)
        for id in ids:
            self._take(id)
        if self._collector:
            self._collector.forget_aborted()
        self._answers.pop(job, None)
        self._end_if_idle()

    def step(self) -> list[tuple[Job, Completions]]:
        done = []
        for output in self.engine.step():
            if not output.finished or output.request_id not in self._rows:
                continue
            row = self._take(output.request_id)
            answers = self._answers[row.job]
            answers[row.number] = self._answer(row, output)
            if all(answer is not None for answer in answers):
                del self._answers[row.job]
                tokens, log_probs, truncated, versions = map(list, zip(*answers, strict=True))
                done.append((row.job, Completions(tokens, log_probs, truncated, versions)))
        self._end_if_idle()
        return done

    def _begin(self, sampling: Sampling) -> None:
        params = self.policy.sampling_params(sampling, seed=None, final_only=True)
        if responses_alone(self.policy.engine, params):
            self.policy.settle()
            self._collector = self._collecting.enter_context(collecting(self.policy.engine))

    def _end_if_idle(self) -> None:
        if not self._rows:
            self._collecting.close()
            self._collector = None

    def _take(self, id: str) -> _Row:
        if self._collector:
            self._collector.others.discard(id)
        return self._rows.pop(id)

    def _answer(self, row: _Row, output: Any) -> tuple[list[int], list[float], bool, Spans]:
        (part,) = output.outputs
        if row.job.params:
            tokens, log_probs = list(part.token_ids), part.logprobs
        elif self._collector:
            tokens, log_probs, _ = self._collector.response(output)
        else:
            tokens, log_probs = list(part.token_ids), list(part.logprobs.logprobs)
        self.tokens += len(tokens)
        return (tokens, log_probs, part.finish_reason == "length",
                spans_of(row.cuts, self.version, end=len(tokens)))

    def set_version(self, version: int) -> None:
        for state in self.engine.output_processor.request_states.values():
            row = self._rows.get(getattr(state, "external_req_id", state.request_id))
            if row is not None:
                row.cuts.append((self.version, self._sampled(state)))
        self.version = version

    def _sampled(self, state: Any) -> int:
        if self._collector:
            return self._collector.sampled(state.request_id)
        return state.detokenizer.num_output_tokens()

    def close(self) -> None:
        self.policy.close()


class TransformersSampler:
    """Drives a :class:`~grpo.policies.transformers.TransformersPolicy`: jobs, not steps.

    A step is the whole generation of all waiting jobs that belong to one call, so weights change
    between jobs only.

    Args:
        policy: its model is this sampler's own.
        version: of the weights.
    """

    def __init__(self, policy: TransformersPolicy, *, version: int = 0) -> None:
        self.policy, self.version, self.tokens = policy, version, 0
        self._jobs: list[Job] = []

    @property
    def idle(self) -> bool:
        return not self._jobs

    def add(self, job: Job) -> None:
        self._jobs.append(job)

    def drop(self, job: Job) -> None:
        self._jobs.remove(job)

    def step(self) -> list[tuple[Job, Completions]]:
        first = self._jobs[0]
        together = [job for job in self._jobs if (job.call, job.of, job.sampling)
                    == (first.call, first.of, first.sampling)]
        self._jobs = [job for job in self._jobs if job not in together]
        rows = [job.first + i for job in together for i in range(len(job.prompts))]
        policy = self.policy.with_sampling(**vars(first.sampling))
        policy.drawn = rows, first.of or len(rows)
        with own_random_numbers(first.sampling.call_seed(first.call)):
            whole = policy._generate([prompt for job in together for prompt in job.prompts])
        self.tokens += sum(map(len, whole.tokens))
        done, start = [], 0
        for job in together:
            part = slice(start, start + len(job.prompts))
            start = part.stop
            tokens = whole.tokens[part]
            done.append((job, Completions(
                tokens, whole.log_probs[part], whole.truncated[part],
                [[(self.version, len(row))] if row else [] for row in tokens])))
        return done

    def set_version(self, version: int) -> None:
        self.version = version

    def close(self) -> None:
        self.policy.close()
