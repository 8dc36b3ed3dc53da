"""The policy of an asynchronous run, for what the trainer itself wants generated."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tensordict import TensorDictBase

from grpo.policies.base import Completions, Policy, RowListener, Sampling
from grpo.policies.driver import Job
from grpo.policies.handle import EngineError
from grpo.policies.ray_engine import Call, WorkerPool

# Seconds: of a look for finished jobs; for an answer that is there to be fetched.
_LOOK, _TAKEN_WITHIN = 0.01, 60.0


class FleetPolicy(Policy):
    """Divide the rows of a call over rollout workers, in contiguous parts.

    Evaluations and the canary's checks join what the workers generate for training. A call draws
    the same samples however many workers share it, as far as their engines are seeded by row.

    Args:
        pool: of the workers.
        sampling: see :class:`~grpo.policies.base.Sampling`.
        heal: replaces workers that died, with the present weights.
        timeout: seconds for a call.
        options: those of :class:`~grpo.policies.base.Policy`.
    """

    def __init__(self, pool: WorkerPool, sampling: Sampling, *, heal: Callable[[], None],
                 timeout: float = 1800.0, **options: Any) -> None:
        super().__init__(sampling, **options)
        self.pool, self.heal, self.timeout = pool, heal, timeout
        self.seeded = False  # ask engines for rows with seeds of their own

    def start_at(self, version: int) -> None:
        for number in self.pool.present:
            self.pool.ask(number, "set_version", version, timeout=60.0)

    def close(self) -> None:
        self.pool.close()

    def start(self, tensordict: TensorDictBase) -> Callable[[], TensorDictBase]:
        """See :meth:`grpo.policies.base.Policy.start`; the workers begin at once."""
        prompts, number = self.prompts_of(tensordict), self.calls
        self.calls += 1
        self.heal()
        calls = self._send(prompts, number)
        return lambda: self.write(tensordict, self._result(calls, prompts, number))

    def _generate(self, prompts: list[list[int]], on_row: RowListener | None = None) -> Completions:
        self.heal()
        return self._result(self._send(prompts, self.calls), prompts, self.calls)

    def _result(self, calls: list[Any], prompts: list[list[int]], number: int) -> Completions:
        """What the workers return, who are all asked anew if one has died meanwhile, also where a
        healing since has replaced it."""
        while True:
            try:
                return self._joined(calls)
            except EngineError:
                self.pool.look()
                if not any(map(self.pool.lost, calls)):
                    raise
                self.heal()  # the pool limits how often
                calls = self._send(prompts, number)

    def _send(self, prompts: list[list[int]], number: int) -> list[Any]:
        while not (numbers := self.pool.usable):  # the last one was found dead just now
            self.heal()  # the pool limits how often
        each = -(-len(prompts) // len(numbers))
        calls = []
        for worker, first in zip(numbers, range(0, len(prompts), each), strict=False):
            job = Job(prompts[first:first + each], self.sampling, call=number, first=first,
                      of=len(prompts), seeded=self.seeded)
            calls.append(self.pool.send(worker, "generate", job, self.timeout))
        return calls

    def _joined(self, calls: list[Any]) -> Completions:
        parts = [self.pool.result(call, timeout=self.timeout + 10.0) for call in calls]
        return Completions(*([row for part in parts for row in getattr(part, name)]
                             for name in ("tokens", "log_probs", "truncated", "versions")))


class FleetSampler:
    """Has rollout workers answer jobs, each as it comes, the one with the fewest rows in hand
    first; a :class:`~grpo.policies.driver.Sampler`.

    Jobs of a worker that died go to the others, or wait until one is there. Tokens have the
    versions that their workers give them.

    Args:
        policy: of the workers. Jobs have one row each.
        together: send jobs of one call that come together as one a worker, for workers that answer
            several at once but take no more while they do.
        heals: replace dead workers here, where the weights stay while this is driven; else whoever
            changes them does.
    """

    def __init__(self, policy: FleetPolicy, *, together: bool, heals: bool) -> None:
        self.policy, self.pool, self.together, self.heals = policy, policy.pool, together, heals
        self.tokens = 0
        self._waiting: deque[list[Job]] = deque()
        self._sent: dict[Call, list[tuple[int, Job]]] = {}  # each with its row of the answer

    @property
    def version(self) -> int:
        """The trainer's; workers date tokens themselves."""
        return self.policy.version()

    def set_version(self, version: int) -> None:
        """Without effect: workers are told with their weights."""

    @property
    def idle(self) -> bool:
        return not self._waiting and not self._sent

    def add(self, job: Job) -> None:
        last = self._waiting[-1] if self.together and self._waiting else None
        if last and (last[0].call, last[0].sampling) == (job.call, job.sampling):
            last.append(job)
        else:
            self._waiting.append([job])

    def drop(self, job: Job) -> None:
        """Nobody waits for a job any more; a worker that has begun it ends it."""
        self._waiting = deque(
            left for jobs in self._waiting if (left := [one for one in jobs if one is not job]))
        for call, rows in self._sent.items():
            self._sent[call] = [(row, one) for row, one in rows if one is not job]

    def step(self) -> list[tuple[Job, Completions | EngineError]]:
        """Hand out what waits, and take what is finished; a job that a worker refuses has an
        error."""
        if self.heals and not self.pool.whole:
            self.policy.heal()
        self._hand_out()
        if not self._sent:
            time.sleep(_LOOK)  # nobody is there to answer
            return []
        done: list[tuple[Job, Completions | EngineError]] = []
        for call in self.pool.wait(list(self._sent), timeout=_LOOK):
            done += self._finished(call)
        for call in [call for call in self._sent if self.pool.lost(call)]:
            if jobs := [job for _, job in self._sent.pop(call)]:
                self._waiting.appendleft(jobs)
        return done

    def close(self) -> None:
        """Without effect: the workers belong to the policy."""

    def _hand_out(self) -> None:
        in_hand = Counter(dict.fromkeys(self.pool.usable, 0))
        for call, rows in self._sent.items():
            if call.number in in_hand:
                in_hand[call.number] += len(rows)
        while in_hand and self._waiting:
            jobs = self._waiting.popleft()
            each = -(-len(jobs) // len(in_hand))
            for first in range(0, len(jobs), each):
                part = jobs[first:first + each]
                number = min(in_hand, key=in_hand.__getitem__)
                in_hand[number] += len(part)
                call = self.pool.send(number, "generate", _joined_job(part), self.policy.timeout)
                self._sent[call] = list(enumerate(part))

    def _finished(self, call: Call) -> list[tuple[Job, Completions | EngineError]]:
        try:
            whole = self.pool.result(call, timeout=_TAKEN_WITHIN)
        except EngineError as error:
            self.pool.look()  # one whose engine has failed is of no use either
            if self.pool.lost(call):
                return []
            return [(job, error) for _, job in self._sent.pop(call)]
        self.tokens += sum(map(len, whole.tokens))
        return [(job, Completions([whole.tokens[row]], [whole.log_probs[row]],
                                  [whole.truncated[row]], [whole.versions[row]]))
                for row, job in self._sent.pop(call)]


def _joined_job(jobs: list[Job]) -> Job:
    """One job of the rows of several of the same call, each of one row."""
    return replace(jobs[0], prompts=[prompt for job in jobs for prompt in job.prompts])
