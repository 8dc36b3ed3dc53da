"""A policy that generates with vLLM in this process."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from grpo.policies.base import Completions, Policy, RowListener, Sampling
from grpo.policies.collect import generate
from grpo.policies.inprocess import stop_engine

if TYPE_CHECKING:
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest


class VLLMPolicy(Policy):
    """Sample with an in-process vLLM engine, CUDA graphs included.

    Args:
        engine: from :func:`grpo.policies.inprocess.start_engine`.
        sampling: see :class:`~grpo.policies.base.Sampling`.
        ignore_eos: always generate ``max_tokens``; for benchmarks.
        lora_request: the adapter to generate with, from
            :attr:`grpo.weights.lora.LoRASync.lora_request`; None: the base model.
        seeded: give each row a seed of its own. An engine whose model is in another process does
            not draw from this one's random numbers; without, a run that goes on draws others than
            one that was not interrupted. Costs time on a GPU.
        options: those of :class:`~grpo.policies.base.Policy`, without ``max_model_len``.

    Raises:
        ValueError: for a ``lora_request`` that would be loaded again at every engine step.

    Examples:
        >>> engine = start_engine(path, device=torch.device("cpu"), dtype=torch.float32,
        ...                       max_model_len=64)                          # doctest: +SKIP
        >>> policy = VLLMPolicy(engine, Sampling(max_tokens=8), pad_token_id=0,
        ...                     eos_token_ids=(1,))                          # doctest: +SKIP
        >>> policy.generate_from_ids([[5, 6, 7]])["tokens", "response"]      # doctest: +SKIP
    """

    def __init__(
        self, engine: LLM, sampling: Sampling, *, ignore_eos: bool = False,
        lora_request: LoRARequest | None = None, seeded: bool = False, **options: Any,
    ) -> None:
        super().__init__(
            sampling, max_model_len=engine.llm_engine.model_config.max_model_len, **options)
        if lora_request is not None and lora_request.load_inplace:
            raise ValueError(f"lora_request {lora_request.lora_name!r} has load_inplace=True, with "
                             "which vLLM reloads the adapter at every engine step; pass the "
                             "request without it")
        self.engine, self.lora_request = engine, lora_request
        self.ignore_eos, self.seeded = ignore_eos, seeded
        self._settled = False

    def close(self) -> None:
        stop_engine(self.engine)

    def _generate(self, prompts: list[list[int]], on_row: RowListener | None = None) -> Completions:
        self.settle()
        params = self.sampling_params(self.sampling)
        if self.seeded:
            params = [self.sampling_params(
                self.sampling, seed=self.sampling.row_seed(self.calls, row))
                for row in range(len(prompts))]
        rows = generate(self.engine, prompts, params, lora_request=self.lora_request, on_row=on_row)
        return Completions([row.tokens for row in rows], [row.log_probs for row in rows],
                           [row.finish_reason == "length" for row in rows])

    can_score = True

    def score(self, rows: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        from vllm import SamplingParams

        self.settle()
        outputs = self.engine.generate(
            [{"prompt_token_ids": [*context, *answer]} for context, answer in rows],
            SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False),
            use_tqdm=False, lora_request=self.lora_request)
        found = []
        for (context, answer), output in zip(rows, outputs, strict=True):
            scored = [position[token] for position, token in zip(
                output.prompt_logprobs[len(context):], answer, strict=True)]
            found.append((sum(one.logprob for one in scored), all(one.rank == 1 for one in scored)))
        return found

    def settle(self) -> None:
        """Called before anything is generated, when all models are loaded.

        Python's collector would look through them again and again while the engine's scheduler, in
        the same interpreter, makes its small objects.
        """
        if not self._settled:
            gc.collect()
            gc.freeze()
            self._settled = True

    def sampling_params(
        self, sampling: Sampling, *, seed: int | None = None, final_only: bool = False
    ) -> SamplingParams:
        """The request for one row, in vLLM's terms.

        Args:
            sampling: how tokens are drawn.
            seed: of random numbers of the row's own; None: the engine's.
            final_only: one output when the row is finished, for callers that step the engine.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        kind = {"output_kind": RequestOutputKind.FINAL_ONLY} if final_only else {}
        return SamplingParams(
            temperature=sampling.temperature,
            max_tokens=sampling.max_tokens,
            seed=seed,
            stop_token_ids=None if self.ignore_eos else list(self.eos_token_ids),
            ignore_eos=self.ignore_eos,
            logprobs=0,  # the sampled token's alone
            flat_logprobs=True,
            detokenize=False,  # turning log-probs into text would cost half the throughput
            **kind,
        )
