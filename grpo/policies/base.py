"""What every policy does: dense prompt tokens in, sampled tokens with their log-probs out."""

from __future__ import annotations

import copy
import itertools
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from grpo import data


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    Only sampling whose distribution the trainer can score is offered: a temperature, and greedy
    decoding (``temperature=0``) for evaluation. Top-p and top-k would renormalise the
    distribution and bias every ratio.
    """

    max_tokens: int  # greatest number of response tokens
    temperature: float = 1.0  # 0 means greedy
    seed: int = 0  # of the random numbers; call n of a policy draws from (seed, n)

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens} must be at least 1")
        if self.temperature < 0:
            raise ValueError(f"temperature={self.temperature} must not be negative; 0 is greedy")

    def call_seed(self, call: int) -> int:
        """The seed of a policy's call number ``call``."""
        return self.seed * 1_000_003 + call

    def row_seed(self, call: int, row: int = 0) -> int:
        """A seed for one row of a call; calls lie 2**20 rows apart, so no two share one."""
        return ((self.call_seed(call) << 20) + row) % 2**62


#: Is told of each row as soon as it is finished: its number in the call, and its tokens.
RowListener: TypeAlias = Callable[[int, list[int]], None]


@dataclass
class Completions:
    """What a backend generated, one list entry a row."""

    tokens: list[list[int]]  # sampled ids, the end token included
    log_probs: list[list[float]]
    truncated: list[bool]  # whether the length limit ended the row
    #: ``[(policy version, tokens), ...]`` in order, where weights can change while a row is
    #: sampled; None: the policy's version is that of all tokens.
    versions: list[list[tuple[int, int]]] | None = None
    #: Which of ``tokens`` the policy sampled, where others have spoken in between; ``versions`` are
    #: of those alone. None: all of them.
    sampled: list[list[bool]] | None = None

    @classmethod
    def joined(cls, parts: Sequence[Completions]) -> Completions:
        """Those of several batches, which are alike in what is None."""
        columns = zip(*(vars(part).values() for part in parts), strict=True)
        return cls(*(None if column[0] is None else [*itertools.chain(*column)]
                     for column in columns))


class Policy(TensorDictModuleBase):
    """Base class of the policies; a backend implements :meth:`_generate`.

    Reads ``("tokens", "prompt")`` int64 ``[B, P]`` and ``("masks", "prompt_attention_mask")`` bool
    ``[B, P]``. Writes, besides the token entries of :mod:`grpo.data`, ``finish_reason`` int64
    ``[B]`` (0 the model stopped, 1 the length limit did), ``("policy_versions", "full")`` int64
    ``[B, T]`` and the oldest of a row, ``policy_version`` int64 ``[B]``.
    Prompts are passed on as token ids and sampled ids are returned as they are: nothing is
    re-tokenised.

    Args:
        sampling: how tokens are drawn.
        pad_token_id: fill value of the token tensors.
        eos_token_ids: tokens that end a response; the sampled one is kept.
        max_model_len: greatest prompt plus response, in tokens.
        version: returns the number of weight updates so far; stamped on every token.
    """

    in_keys = [data.PROMPT_TOKENS, data.PROMPT_MASK]
    out_keys = [data.RESPONSE_TOKENS, data.TOKENS, data.ATTENTION_MASK, data.ASSISTANT_MASK,
                data.LOG_PROBS, data.FINISH_REASON, data.POLICY_VERSIONS, data.POLICY_VERSION]
    #: Whether it has :meth:`score`.
    can_score = False

    def __init__(self, sampling: Sampling, *, pad_token_id: int, eos_token_ids: tuple[int, ...],
                 max_model_len: int, version: Callable[[], int] = lambda: 0) -> None:
        super().__init__()
        self.sampling, self.version, self.calls = sampling, version, 0
        self.pad_token_id, self.eos_token_ids = pad_token_id, eos_token_ids
        self.max_model_len = max_model_len

    def with_sampling(self, **changes) -> Policy:
        """A policy with the same engine and weights that draws differently.

        Args:
            **changes: fields of :class:`Sampling`, for example ``temperature=0.0``.
        """
        other = copy.copy(self)
        other.sampling = replace(self.sampling, **changes)
        other.calls = 0
        return other

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Generate one response a row and write it into ``tensordict``.

        Raises:
            ValueError: if a prompt leaves no room for a response.
            FloatingPointError: if a log-prob is not a number.
        """
        return self.stream(tensordict)

    @torch.no_grad()
    def stream(
        self, tensordict: TensorDictBase, on_row: RowListener | None = None
    ) -> TensorDictBase:
        """Call the policy, and be told of each row while others are generated.

        An engine of vLLM tells, wherever it is; several that share a call do not.

        Args:
            tensordict: as for a call.
            on_row: called between two steps of the engine, in this thread.
        """
        prompts = self.prompts_of(tensordict)
        # Own random numbers for each call: a resumed run draws what an uninterrupted one did, and
        # evaluation does not shift the numbers of training.
        with own_random_numbers(self.sampling.call_seed(self.calls)):
            completions = self._generate(prompts, on_row)
        self.calls += 1
        return self.write(tensordict, completions)

    def start(self, tensordict: TensorDictBase) -> Callable[[], TensorDictBase]:
        """Call the policy in two steps, between which an engine elsewhere generates.

        Returns:
            The second step, which waits for the responses and returns what a call would. Here
            nothing happens before it.
        """
        return lambda: self(tensordict)

    def prompts_of(self, tensordict: TensorDictBase) -> list[list[int]]:
        """Token ids of a batch's prompts, which must leave room for a response."""
        prompts = first_of_rows(tensordict[data.PROMPT_TOKENS],
                                tensordict[data.PROMPT_MASK].sum(1).tolist())
        longest = max(map(len, prompts))
        if longest >= self.max_model_len:
            raise ValueError(f"a prompt has {longest} tokens but prompt and response share "
                             f"max_model_len={self.max_model_len}; shorten or skip the prompt, or "
                             "raise inference_model.max_model_len")
        return prompts

    def score(self, rows: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """How likely given continuations are, at temperature 1.

        Args:
            rows: token ids of a context, at least one, and of what follows.

        Returns:
            Of each row the log-prob of the continuation, in nats, and whether greedy decoding
            would have given it.

        Raises:
            NotImplementedError: where the engine is out of reach, see :attr:`can_score`.
        """
        raise NotImplementedError(f"{type(self).__name__} does not score given texts")

    @abstractmethod
    def _generate(self, prompts: list[list[int]], on_row: RowListener | None = None) -> Completions:
        """Sample one completion for each prompt, under ``self.sampling``."""

    def write(self, tensordict: TensorDictBase, completions: Completions) -> TensorDictBase:
        prompt_BP, mask_BP = tensordict[data.PROMPT_TOKENS], tensordict[data.PROMPT_MASK]
        width, device = self.sampling.max_tokens, prompt_BP.device
        response_BR = data.pad_rows(completions.tokens, width, self.pad_token_id)
        sizes = [*map(len, completions.tokens)]
        if (given := [*map(len, completions.log_probs)]) != sizes:
            raise RuntimeError(f"the engine returned {given} log-probs for the rows' {sizes} "
                               "tokens; this version of it is not supported")
        response_mask_BR = torch.arange(width) < torch.tensor(sizes)[:, None]
        log_probs_BR = data.pad_rows(completions.log_probs, width, 0.0, dtype=torch.float32)
        _refuse_nan(log_probs_BR, self.version)
        tensordict[data.RESPONSE_TOKENS] = response_BR.to(device)
        tensordict.update(data.join_prompt_response(
            prompt_BP, mask_BP, response_BR.to(device), response_mask_BR.to(device),
            log_probs_BR.to(device), pad_token_id=self.pad_token_id))
        if completions.sampled is not None:
            sampled_BR = data.pad_rows(completions.sampled, width, False, dtype=torch.bool)
            mask_BT = tensordict[data.ASSISTANT_MASK]
            tensordict[data.ASSISTANT_MASK] = mask_BT.masked_scatter(
                mask_BT, sampled_BR[response_mask_BR].to(device))
        reason = torch.where(torch.tensor(completions.truncated), data.FINISH_LENGTH,
                             data.FINISH_STOP)
        tensordict[data.FINISH_REASON] = reason.to(device)
        return data.stamp_versions(tensordict, self._versions(completions, width))

    def _versions(self, completions: Completions, width: int) -> Tensor:
        """The version of every response token, int64 ``[B, R]``; any after its last."""
        if completions.versions is None:
            return torch.full((len(completions.tokens), width), self.version())
        rows = [[version for version, tokens in spans for _ in range(tokens)]
                for spans in completions.versions]
        dated, sampled = [*map(len, rows)], [*map(sum, completions.sampled or ())] or [
            *map(len, completions.tokens)]
        if dated != sampled:
            raise RuntimeError(f"the engine dated {dated} tokens of the rows but sampled {sampled}")
        return data.pad_rows(rows, width, self.version())

    def start_at(self, version: int) -> None:
        """Count weight updates from here, when a run goes on, if the engine counts them itself."""

    def close(self) -> None:
        """Release what the backend holds; the policy cannot be used afterwards."""

    def generate_from_ids(self, prompts: list[list[int]]) -> TensorDict:
        """Convenience for lists of token ids: pad them, call the policy, return its batch."""
        return self(self.pad_prompts(prompts))

    def pad_prompts(self, prompts: list[list[int]]) -> TensorDict:
        """The batch that the policy reads, from lists of token ids."""
        width = max(map(len, prompts))
        batch = TensorDict({}, batch_size=[len(prompts)])
        batch[data.PROMPT_TOKENS] = data.pad_rows(prompts, width, self.pad_token_id)
        batch[data.PROMPT_MASK] = data.pad_rows([[1] * len(p) for p in prompts], width, 0).bool()
        return batch


@contextmanager
def own_random_numbers(seed: int) -> Iterator[None]:
    """Seed what backends draw from, and put the global states back afterwards."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    state = np.random.get_state()
    with torch.random.fork_rng(devices):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed asks for each kind of device
        if devices:
            torch.cuda.manual_seed(seed)
        np.random.seed(seed % 2**32)  # vLLM's GPU runner seeds its sampler from numpy
        try:
            yield
        finally:
            np.random.set_state(state)


def _refuse_nan(log_probs_BR: Tensor, version: Callable[[], int]) -> None:
    """They would reach the gradient, and in a checkpoint with waiting rollouts every later one."""
    broken_B = ~log_probs_BR.isfinite().all(-1)
    if broken_B.any():
        raise FloatingPointError(
            f"{int(broken_B.sum())} of {len(broken_B)} rows have log-probs that are not numbers, "
            f"sampled by version {version()} of the weights; nothing was trained on them. Go on "
            "from an earlier checkpoint with a lower optimizer.lr; if it happens again at once, "
            "the model overflows: see train_model.torch_dtype and train_model.fp32_head")


def first_of_rows(values_BT: Tensor, sizes: list[int]) -> list[list]:
    """So many values of each row."""
    return [row[:size] for row, size in zip(values_BT.tolist(), sizes, strict=True)]
