"""A policy that generates on an engine server, in another process or on another machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from grpo.policies.base import Completions, Policy, RowListener, Sampling
from grpo.policies.client import EngineClient, EngineTimeoutError, Generated


class ServerPolicy(Policy):
    """Sample over HTTP, all prompts of a batch in one call.

    Tokens carry the version that sampled them, as the server counts; an update in flight makes a
    row as old as its oldest token.

    Args:
        client: of the server.
        sampling: see :class:`~grpo.policies.base.Sampling`.
        ignore_eos: always generate ``max_tokens``; for benchmarks.
        seeded: draw the same samples again for the same seed and call. The engine then needs a
            random generator a row, which slows large batches on a GPU; without, samples differ
            from run to run.
        timeout: seconds for one batch.
        stop: what :meth:`close` calls, to end a server that is the policy's own.
        options: those of :class:`~grpo.policies.base.Policy`, but what the server knows.

    Raises:
        RuntimeError: when called, if the engine aborted a row, as ``pause(mode="abort")`` does.
        EngineTimeoutError: when called, after ``timeout``.

    Examples:
        >>> policy = ServerPolicy(EngineClient("http://127.0.0.1:9001"),
        ...                       Sampling(max_tokens=8), pad_token_id=0,
        ...                       eos_token_ids=(1,))                          # doctest: +SKIP
        >>> policy.generate_from_ids([[5, 6, 7]])["tokens", "response"]        # doctest: +SKIP
    """

    #: How whoever uses it gives it more time; a run has a key for that.
    more_time: str = "give timeout=SECONDS"

    def __init__(
        self, client: EngineClient, sampling: Sampling, *, ignore_eos: bool = False,
        seeded: bool = True, timeout: float = 1200.0, stop: Callable[[], None] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(sampling, max_model_len=client.info()["max_model_len"],
                         version=lambda: client.version, **options)
        self.client, self.timeout, self.stop = client, timeout, stop
        self.ignore_eos, self.seeded = ignore_eos, seeded

    def start_at(self, version: int) -> None:
        # Environments may be asking already; tokens that are being sampled have no one version.
        self.client.pause("keep", clear_cache=False)
        try:
            self.client.set_version(version)
        finally:
            self.client.resume()

    def close(self) -> None:
        if self.stop is not None:
            self.stop()

    def _generate(self, prompts: list[list[int]], on_row: RowListener | None = None) -> Completions:
        def tell(row: int, answer: Generated) -> None:
            if answer.finish_reasons[0] != "abort":
                on_row(row, answer.tokens[0])

        try:
            answers = self.client.generate(
                prompts, timeout=self.timeout, on_answer=on_row and tell,
                max_tokens=self.sampling.max_tokens,
                temperature=float(self.sampling.temperature), ignore_eos=self.ignore_eos,
                stop_token_ids=None if self.ignore_eos else list(self.eos_token_ids),
                seed=self.sampling.row_seed(self.calls) if self.seeded else None)
        except EngineTimeoutError as error:
            raise EngineTimeoutError(f"{error}; if batches take longer, {self.more_time}") from None
        _refuse_aborted(answers)
        return Completions(
            tokens=[answer.tokens[0] for answer in answers],
            log_probs=[answer.log_probs[0] for answer in answers],
            truncated=[answer.finish_reasons[0] == "length" for answer in answers],
            versions=[answer.versions[0] for answer in answers])


def _refuse_aborted(answers: list[Generated]) -> None:
    aborted = [row for row, answer in enumerate(answers) if answer.finish_reasons[0] == "abort"]
    if aborted:
        raise RuntimeError(f"the engine aborted {len(aborted)} of {len(answers)} rows (the first "
                           f"is row {aborted[0]}), so they are no samples of the policy; pause it "
                           "with mode keep or wait while rollouts run")
