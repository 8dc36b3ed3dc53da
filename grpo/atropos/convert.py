"""Finished groups of an Atropos environment as a dense batch of :mod:`grpo.data`.

A row of a group is a list of tokens and a mask that is -100 where a token is not trained. Trained
tokens may lie anywhere after the first one: a row of several turns has gaps, where the environment
spoke. The prompt of a row is what comes before its first trained token, its response all the rest;
``("masks", "all_assistant_mask")`` marks the trained tokens alone.

Besides the entries of :mod:`grpo.data` a batch has

========================================  =======  ==========  ===================================
key                                       dtype    shape       meaning
========================================  =======  ==========  ===================================
``("given", "advantage")``                float32  ``[B, 1]``  of groups that bring their own
``("given", "token_advantage")``          float32  ``[B, T]``  the same, one a token
``("given", "zero_advantage")``           bool     ``[B, 1]``  ``overrides.set_advantage_to_zero``
``"temperature"``                         float32  ``[B, 1]``  the row was sampled at; NaN also
                                                               where other options shaped it
========================================  =======  ==========  ===================================

with NaN where nothing is given. :class:`~grpo.atropos.advantages.GivenAdvantage` applies them.
A trained token whose log-prob nobody knows has NaN in ``("log_probs", "full")``: it cannot be
trained on by mistake, and :class:`~grpo.atropos.recompute.RecomputeLogProbs` fills it in.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from grpo import data
from grpo.atropos.schemas import IGNORED, ScoredGroup
from grpo.atropos.wire_json import GroupError
from grpo.policies.neutral import altering

GIVEN_ADVANTAGE = ("given", "advantage")
GIVEN_TOKEN_ADVANTAGE = ("given", "token_advantage")
ZERO_ADVANTAGE = ("given", "zero_advantage")
TEMPERATURE = "temperature"


@dataclass(frozen=True)
class Sampled:
    """What the policy knows of the rows of a group that it sampled; one list entry a row.

    Attributes:
        log_probs: of every token of the row, NaN where the policy has no record of it.
        versions: policy version of every token, ``NO_VERSION`` of :mod:`grpo.data` where there is
            no record.
        temperatures: that the row was sampled at; None: not known; NaN: not with a temperature
            alone, or with several.
        truncated: whether the length limit cut the last turn.
    """

    log_probs: list[list[float]]
    versions: list[list[int]]
    temperatures: list[float | None]
    truncated: list[bool]


@dataclass
class _Row:
    tokens: list[int]
    trained: Tensor  # bool [tokens]
    log_probs: Tensor  # float32 [tokens], 0 outside `trained`
    versions: Tensor  # int64 [tokens]
    version: int  # the oldest of the trained ones
    reward: float
    group: int
    truncated: bool
    temperature: float
    in_loss: bool
    advantage: float
    token_advantages: list[float]
    zero: bool
    ref_log_probs: list[float] | None
    distill: tuple[list[list[int]], list[list[float]]]

    @property
    def start(self) -> int:
        """First trained token, where the response begins."""
        return int(self.trained.int().argmax()) if self.trained.any() else len(self.tokens)


class GroupConverter:
    """Turn groups into batches, and count what had to be left out.

    Args:
        pad_token_id: fill value of the token tensors.
        seq_len: longer rows are cut to so many tokens; None: none is.
        temperature: that the trainer scores at. Rows known to be sampled from another distribution
            are left out of the loss, because their ratios would compare two. None: any is taken.
        max_staleness: tokens that a policy more than so many versions ago sampled are not
            trained; None: all are.
        distill_topk: width ``K`` of the teacher's entries; None: as many as the groups bring.
        vocab_size: token ids of the model are below it; None: any is taken.

    Attributes:
        counts: since the start: ``groups``, ``rows``, ``rows_cut`` to ``seq_len``,
            ``rows_untrained`` (no trained token), ``rows_other_sampling``,
            ``rows_without_log_probs`` (of one trained
            token or more), ``tokens_stale``.
        next_group: number of the next group; batches never share one.

    Raises:
        ValueError: for an option out of range.

    Examples:
        >>> group = ScoredGroup(tokens=[[5, 6, 7], [5, 8]], masks=[[-100, 6, 7], [-100, 8]],
        ...                     scores=[1.0, 0.0], inference_logprobs=[[1.0, -.5, -.25], [1., -2]])
        >>> batch = GroupConverter(pad_token_id=0)([group])
        >>> batch["tokens", "full"].tolist(), batch["log_probs", "full"].tolist()
        ([[5, 6, 7], [5, 8, 0]], [[0.0, -0.5, -0.25], [0.0, -2.0, 0.0]])
    """

    def __init__(
        self,
        *,
        pad_token_id: int,
        seq_len: int | None = None,
        temperature: float | None = None,
        max_staleness: int | None = None,
        distill_topk: int | None = None,
        vocab_size: int | None = None,
    ) -> None:
        for name, value, least in (("seq_len", seq_len, 2), ("max_staleness", max_staleness, 0),
                                   ("distill_topk", distill_topk, 0),
                                   ("vocab_size", vocab_size, 1)):
            if value is not None and value < least:
                raise ValueError(f"{name}={value} must be at least {least}, or None")
        if temperature is not None and not 0 < temperature < math.inf:
            raise ValueError(f"temperature={temperature} must be positive and finite, or None to "
                             "take rows of any")
        self.pad_token_id, self.seq_len, self.temperature = pad_token_id, seq_len, temperature
        self.max_staleness, self.distill_topk = max_staleness, distill_topk
        self.vocab_size = vocab_size
        self.counts: Counter[str] = Counter()
        self.next_group = 0

    def __call__(
        self,
        groups: Sequence[ScoredGroup],
        *,
        sampled: Sequence[Sampled | None] | None = None,
        version: int = 0,
    ) -> TensorDict:
        """One batch of all rows of the groups, in order.

        Args:
            groups: at least one.
            sampled: what the policy recorded of each; it takes precedence over what the
                environment sent.
            version: the policy's present version; tokens that nobody dated count as sampled by it.

        Raises:
            ValueError: without groups.
            GroupError: for a group that :meth:`check` refuses.
        """
        if not groups:
            raise ValueError("no groups to convert; wait until one has finished")
        rows: list[_Row] = []
        for group, known in zip(groups, sampled or [None] * len(groups), strict=True):
            rows += self._rows(group, known, version)
        self.counts["groups"] += len(groups)
        self.counts["rows"] += len(rows)
        return self._stack(rows)

    def check(self, group: ScoredGroup) -> None:
        """See whether the model can be trained on a group.

        Raises:
            GroupError: for images, and for tokens that the model has not.
        """
        if group.images:
            raise GroupError("images", f"a group of environment {group.env_id} has images, but "
                             "this trainer is for text; start the environment without them")
        if self.vocab_size is None:
            return
        named = {"tokens": group.tokens}
        if self.distill_topk != 0:  # else they are not read
            named["distill_token_ids"] = [
                [token for ids in row for token in ids] for row in group.distill_token_ids or []]
        for name, rows in named.items():
            highest = max((max(row) for row in rows if row), default=0)
            if highest >= self.vocab_size:
                raise GroupError(
                    "unknown_token", f"{name} of environment {group.env_id} has the token id "
                    f"{highest}; ids of this model are 0 to {self.vocab_size - 1}: does the "
                    "environment use another tokenizer?")

    def _rows(self, group: ScoredGroup, known: Sampled | None, version: int) -> list[_Row]:
        self.check(group)
        number, self.next_group = self.next_group, self.next_group + 1
        return [self._row(group, known, i, version, number) for i in range(len(group.tokens))]

    def _row(
        self, group: ScoredGroup, known: Sampled | None, i: int, version: int, number: int
    ) -> _Row:
        tokens = group.tokens[i][: self.seq_len]
        trained = torch.tensor(group.masks[i][: self.seq_len]) != IGNORED
        trained[:1] = False  # there is nothing that the first token could be predicted from
        cut = len(tokens) < len(group.tokens[i])
        versions = known.versions[i] if known else [data.NO_VERSION]
        dated = torch.tensor(versions)[: len(tokens)].expand(len(tokens))
        dated = torch.where(dated == data.NO_VERSION, version, dated)
        if self.max_staleness is not None:
            fresh = dated >= version - self.max_staleness
            self.counts["tokens_stale"] += int((trained & ~fresh).sum())
            trained &= fresh
        log_probs = self._log_probs(group, known, i, trained)
        temperature = _temperature(group, known, i)
        in_loss = self.temperature is None or math.isclose(
            temperature if temperature is not None else self.temperature, self.temperature,
            rel_tol=1e-6)
        self.counts["rows_cut"] += cut
        self.counts["rows_untrained"] += not trained.any()
        self.counts["rows_other_sampling"] += not in_loss
        self.counts["rows_without_log_probs"] += bool(log_probs.isnan().any())
        advantage, token_advantages = _given_advantage(group, i)
        return _Row(
            tokens=tokens, trained=trained, log_probs=log_probs,
            versions=dated.where(trained, data.NO_VERSION),
            version=int(dated[trained].min()) if trained.any() else version,
            reward=group.scores[i], group=number,
            truncated=cut or bool(known and known.truncated[i]),
            temperature=math.nan if temperature is None else temperature, in_loss=in_loss,
            advantage=advantage, token_advantages=token_advantages,
            zero=bool(_override(group, i).get("set_advantage_to_zero", False)),
            ref_log_probs=group.ref_logprobs[i] if group.ref_logprobs else None,
            distill=(group.distill_token_ids[i], group.distill_logprobs[i])
            if group.distill_token_ids else ([], []))

    def _log_probs(
        self, group: ScoredGroup, known: Sampled | None, i: int, trained: Tensor
    ) -> Tensor:
        """What the policy recorded, else what the environment sent, else NaN."""
        size = len(trained)
        values = torch.full((size,), math.nan)
        if group.inference_logprobs and len(group.inference_logprobs[i]):
            values = torch.tensor(group.inference_logprobs[i], dtype=torch.float32)[:size]
            # 1.0 is how environments say that a token was not sampled.
            values = torch.where(values > 0, math.nan, values)
        if known:
            recorded = torch.tensor(known.log_probs[i], dtype=torch.float32)[:size]
            values = torch.where(recorded.isnan(), values, recorded)
        return torch.where(trained, values, 0.0)

    def _stack(self, rows: list[_Row]) -> TensorDict:
        B = len(rows)
        starts = [row.start for row in rows]
        sizes = torch.tensor([len(row.tokens) for row in rows])
        P = max(1, *starts)
        R = max(1, *(len(row.tokens) - s for row, s in zip(rows, starts, strict=True)))
        T = int(sizes.max())
        out = TensorDict({}, batch_size=[B])

        def token_values(values: list[Tensor], fill: float, dtype: torch.dtype) -> Tensor:
            full = torch.full((B, T), fill, dtype=dtype)
            for i, row in enumerate(values):
                full[i, : len(row)] = row
            return full

        def row_values(name: str, dtype: torch.dtype) -> Tensor:
            return torch.tensor([getattr(row, name) for row in rows], dtype=dtype)

        out[data.PROMPT_TOKENS] = data.pad_rows(
            [row.tokens[:s] for row, s in zip(rows, starts, strict=True)], P, self.pad_token_id)
        out[data.PROMPT_MASK] = torch.arange(P) < torch.tensor(starts)[:, None]
        out[data.RESPONSE_TOKENS] = data.pad_rows(
            [row.tokens[s:] for row, s in zip(rows, starts, strict=True)], R, self.pad_token_id)
        out[data.TOKENS] = data.pad_rows([row.tokens for row in rows], T, self.pad_token_id)
        out[data.ATTENTION_MASK] = torch.arange(T) < sizes[:, None]
        out[data.ASSISTANT_MASK] = token_values([row.trained for row in rows], 0, torch.bool)
        out[data.LOG_PROBS] = token_values([row.log_probs for row in rows], 0.0, torch.float32)
        out[data.REWARD] = row_values("reward", torch.float32)[:, None]
        out[data.REWARD_ERROR] = torch.zeros(B, 1, dtype=torch.bool)
        # Atropos knows no success; with scores around 0 or from 0 to 1 the sign tells.
        out[data.SUCCESS] = out[data.REWARD] > 0
        out[data.TRUNCATED] = row_values("truncated", torch.bool)[:, None]
        out[data.FINISH_REASON] = out[data.TRUNCATED][:, 0].long() * data.FINISH_LENGTH
        out[data.GROUP_ID] = row_values("group", torch.int64)
        out[data.POLICY_VERSIONS] = token_values([row.versions for row in rows], data.NO_VERSION,
                                                 torch.int64)
        out[data.POLICY_VERSION] = row_values("version", torch.int64)
        out[data.ROW_MASK] = row_values("in_loss", torch.bool)[:, None]
        out[TEMPERATURE] = row_values("temperature", torch.float32)[:, None]
        out[GIVEN_ADVANTAGE] = row_values("advantage", torch.float32)[:, None]
        out[GIVEN_TOKEN_ADVANTAGE] = token_values(
            [torch.tensor(row.token_advantages[:T]) for row in rows], math.nan, torch.float32)
        out[ZERO_ADVANTAGE] = row_values("zero", torch.bool)[:, None]
        # Compared with a reference all rows must be, or the loss must say that it cannot.
        if all(row.ref_log_probs is not None for row in rows):
            out[data.REF_LOG_PROBS] = token_values(
                [torch.tensor(row.ref_log_probs[: len(row.tokens)]) for row in rows], 0.0,
                torch.float32) * out[data.ASSISTANT_MASK]
        self._add_distillation(out, rows)
        return out

    def _add_distillation(self, out: TensorDict, rows: list[_Row]) -> None:
        """The teacher's most likely tokens; -inf where it named fewer, or none."""
        K = self.distill_topk
        if K is None:
            K = max((len(ids) for row in rows for ids in row.distill[0]), default=0)
        if not K:
            return
        shape = (*out[data.TOKENS].shape, K)
        ids_BTK, log_probs_BTK = torch.zeros(shape, dtype=torch.int64), torch.full(shape, -math.inf)
        for i, row in enumerate(rows):
            for t, (ids, values) in enumerate(zip(*row.distill, strict=True)):
                if t < len(row.tokens) and row.trained[t] and ids:
                    best = torch.tensor(values).argsort(descending=True)[:K]
                    ids_BTK[i, t, : len(best)] = torch.tensor(ids)[best]
                    log_probs_BTK[i, t, : len(best)] = torch.tensor(values)[best]
        out[data.DISTILL_IDS], out[data.DISTILL_LOG_PROBS] = ids_BTK, log_probs_BTK

    def state_dict(self) -> dict[str, Any]:
        """Counters, for checkpoints."""
        return {"counts": dict(self.counts), "next_group": self.next_group}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.counts, self.next_group = Counter(state["counts"]), state["next_group"]


def groups_to_batch(groups: Sequence[ScoredGroup], *, pad_token_id: int, **options) -> TensorDict:
    """One batch of some groups; see :class:`GroupConverter` for the options."""
    return GroupConverter(pad_token_id=pad_token_id, **options)(groups)


def _override(group: ScoredGroup, i: int) -> dict[str, Any]:
    overrides = group.overrides or []
    return (overrides[i] if i < len(overrides) else None) or {}


def _temperature(group: ScoredGroup, known: Sampled | None, i: int) -> float | None:
    """What the row was sampled at: as recorded, else as the environment says, else None.

    NaN where it says that more than a temperature shaped the distribution, such as ``top_p``.
    """
    if known and known.temperatures[i] is not None:
        return known.temperatures[i]
    said: dict[str, Any] = {}
    for source in (group.group_overrides, group.generation_params, _override(group, i)):
        said |= {name: value for name, value in (source or {}).items() if value is not None}
    if altering(said):
        return math.nan
    return None if "temperature" not in said else float(said["temperature"])


def _given_advantage(group: ScoredGroup, i: int) -> tuple[float, list[float]]:
    """The row's own advantage, NaN without one, and those of its tokens, empty without."""
    if group.advantages is None:
        return math.nan, []
    value = group.advantages[i]
    return (math.nan, value) if isinstance(value, (list, tuple)) else (float(value), [])
