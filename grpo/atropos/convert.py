"""Finished groups of an Atropos environment as a dense batch of :mod:`grpo.data`.

A row of a group is a list of tokens and a mask that is -100 where a token is not trained. The
prompt of a row ends before its first trained token; the rest is its response, which in a row of
several turns has gaps where the environment spoke. ``("masks", "all_assistant_mask")`` marks the
trained tokens alone.

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
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import torch
from tensordict import NestedKey, TensorDict
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

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
    """What the policy knows of the rows of a group that it sampled; one list entry a row."""

    log_probs: list[list[float]]  # of every token of the row, NaN where there is no record
    versions: list[list[int]]  # of the policy, for every token; `NO_VERSION` without a record
    # None: not known; NaN: several, or not with a temperature alone.
    temperatures: list[float | None]
    truncated: list[bool]  # the length limit cut the last turn


@dataclass(eq=False)
class GroupConverter:
    """Turn groups into batches, and count what had to be left out.

    Args:
        pad_token_id: fill value of the token tensors.
        seq_len: longer rows are cut to so many tokens; None: none is.
        temperature: that the trainer scores at. Rows known to be sampled from another distribution
            are left out of the loss, because their ratios would compare two. None: any is taken.
        max_staleness: tokens sampled by a policy more than so many versions ago are not trained;
            None: all are.
        distill_topk: width ``K`` of the teacher's entries; None: as many as the groups bring.
        vocab_size: token ids of the model are below it; None: any is taken.

    Attributes:
        counts: since the start: ``groups``, ``rows``, ``rows_cut`` to ``seq_len``,
            ``rows_untrained`` (no trained token), ``rows_other_sampling``,
            ``rows_without_log_probs`` (for at least one trained token), ``tokens_stale``.
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

    _: KW_ONLY
    pad_token_id: int
    seq_len: int | None = None
    temperature: float | None = None
    max_staleness: int | None = None
    distill_topk: int | None = None
    vocab_size: int | None = None
    counts: Counter[str] = field(default_factory=Counter, init=False)
    next_group: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        for name, least in (("seq_len", 2), ("max_staleness", 0), ("distill_topk", 0),
                            ("vocab_size", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name}={value} must be at least {least}, or None")
        if self.temperature is not None and not 0 < self.temperature < math.inf:
            raise ValueError(f"temperature={self.temperature} must be positive and finite, or None "
                             "to take rows of any")

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
            version: the policy's present version; tokens of unknown version count as its own.

        Raises:
            ValueError: without groups.
            GroupError: for a group that :meth:`check` refuses.
        """
        if not groups:
            raise ValueError("no groups to convert; wait until one has finished")
        rows, teachers = [], []
        for group, known in zip(groups, sampled or [None] * len(groups), strict=True):
            self.check(group)
            rows += [self._row(group, known, i, version) for i in range(len(group))]
            none = [[]] * len(group)
            teachers += zip(group.distill_token_ids or none, group.distill_logprobs or none,
                            strict=True)
            self.next_group += 1
        self.counts["groups"] += len(groups)
        self.counts["rows"] += len(rows)
        batch = self._stack(rows)
        self._add_distillation(batch, teachers)
        return batch

    def check(self, group: ScoredGroup) -> None:
        """Refuse a group that the model cannot be trained on.

        Raises:
            GroupError: for images, and for tokens outside the model's vocabulary.
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

    def _row(
        self, group: ScoredGroup, known: Sampled | None, i: int, version: int
    ) -> dict[NestedKey, Tensor]:
        """The entries of one row: ``[tokens]`` where the batch has ``[B, T]``, else ``[1]``, or a
        scalar where the batch has ``[B]``."""
        tokens = torch.tensor(group.tokens[i][: self.seq_len])
        size = len(tokens)
        trained = torch.tensor(group.masks[i][:size]) != IGNORED
        trained[:1] = False  # there is nothing that the first token could be predicted from
        cut = size < len(group.tokens[i])
        versions = known.versions[i] if known else [data.NO_VERSION]
        dated = torch.tensor(versions)[:size].expand(size)
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
        given = math.nan if group.advantages is None else group.advantages[i]
        of_tokens = isinstance(given, (list, tuple))
        row = {
            data.TOKENS: tokens, data.ATTENTION_MASK: torch.ones(size, dtype=torch.bool),
            data.ASSISTANT_MASK: trained, data.LOG_PROBS: log_probs,
            data.POLICY_VERSIONS: dated.where(trained, data.NO_VERSION),
            data.POLICY_VERSION: dated[trained].min() if trained.any() else torch.tensor(version),
            data.GROUP_ID: torch.tensor(self.next_group), data.REWARD: _float(group.scores[i]),
            data.TRUNCATED: torch.tensor([cut or bool(known and known.truncated[i])]),
            data.ROW_MASK: torch.tensor([in_loss]),
            TEMPERATURE: _float(math.nan if temperature is None else temperature),
            GIVEN_ADVANTAGE: _float(math.nan if of_tokens else given),
            GIVEN_TOKEN_ADVANTAGE: torch.tensor(given[:size], dtype=torch.float32) if of_tokens
            else torch.full((size,), math.nan),
            ZERO_ADVANTAGE: torch.tensor(
                [bool(_override(group, i).get("set_advantage_to_zero", False))])}
        if group.ref_logprobs:
            reference = torch.tensor(group.ref_logprobs[i][:size], dtype=torch.float32)
            row[data.REF_LOG_PROBS] = reference * trained
        return row

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

    def _stack(self, rows: list[dict[NestedKey, Tensor]]) -> TensorDict:
        fills = {data.TOKENS: self.pad_token_id, data.POLICY_VERSIONS: data.NO_VERSION,
                 GIVEN_TOKEN_ADVANTAGE: math.nan}
        out = TensorDict(batch_size=[len(rows)])
        for key in rows[0]:
            # A reference that some rows lack is left out, so that a loss in need of it says so.
            if all(key in row for row in rows):
                values = [row[key] for row in rows]
                out[key] = (pad_sequence(values, batch_first=True, padding_value=fills.get(key, 0))
                            if values[0].ndim else torch.stack(values))
        # The response begins at the first trained token; a row without one is all prompt.
        tokens_BT, size_B1 = out[data.TOKENS], data.lengths(out)[:, None]
        start_B1 = data.first_scored(out[data.ASSISTANT_MASK], out[data.ATTENTION_MASK])[:, None]
        P, R = int(start_B1.max()), max(1, int((size_B1 - start_B1).max()))
        out[data.PROMPT_MASK] = torch.arange(P) < start_B1
        out[data.PROMPT_TOKENS] = tokens_BT[:, :P].where(out[data.PROMPT_MASK], self.pad_token_id)
        at_BR = start_B1 + torch.arange(R)
        out[data.RESPONSE_TOKENS] = tokens_BT.gather(1, at_BR.clamp(max=tokens_BT.shape[1] - 1)) \
            .where(at_BR < size_B1, self.pad_token_id)
        out[data.REWARD_ERROR] = torch.zeros(len(rows), 1, dtype=torch.bool)
        # Atropos does not say what succeeded. Scores are around 0 or from 0 to 1: the sign tells.
        out[data.SUCCESS] = out[data.REWARD] > 0
        out[data.FINISH_REASON] = out[data.TRUNCATED][:, 0].long() * data.FINISH_LENGTH
        return out

    def _add_distillation(
        self, out: TensorDict, teachers: list[tuple[list[list[int]], list[list[float]]]]
    ) -> None:
        """The teacher's most likely tokens; -inf where it named fewer, or none."""
        K = self.distill_topk
        if K is None:
            K = max((len(ids) for row, _ in teachers for ids in row), default=0)
        if not K:
            return
        shape = (*out[data.TOKENS].shape, K)
        ids_BTK, log_probs_BTK = torch.zeros(shape, dtype=torch.int64), torch.full(shape, -math.inf)
        trained = out[data.ASSISTANT_MASK].tolist()
        for i, teacher in enumerate(teachers):
            for t, (ids, values, used) in enumerate(zip(*teacher, trained[i], strict=False)):
                if used and ids:
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


def _float(value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float32)
