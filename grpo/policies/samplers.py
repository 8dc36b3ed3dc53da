"""What an :class:`~grpo.policies.driver.EngineDriver` drives: vLLM, or a Transformers model."""

from __future__ import annotations

import itertools
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from grpo.policies.base import Completions, Sampling, own_random_numbers
from grpo.policies.collect import Collector, collecting, responses_alone
from grpo.policies.driver import Job
from grpo.policies.spans import Spans, spans_of
from grpo.policies.transformers import TransformersPolicy
from grpo.policies.vllm import VLLMPolicy


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
        if not self._rows and not job.params:
            self._begin(job.sampling)
        self._answers[job] = [None] * len(job.prompts)
        try:
            for number, prompt in enumerate(job.prompts):
                self._add_row(job, number, prompt)
        except Exception:  # the engine refuses a row; those before it go, too
            self.drop(job)
            raise

    def _add_row(self, job: Job, number: int, prompt: list[int]) -> None:
        seeded = self.seeded or job.seeded
        seed = job.sampling.row_seed(job.call, job.first + number) if seeded else None
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
