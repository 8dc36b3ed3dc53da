"""Scored groups of the Atropos API as a TorchRL environment."""

from __future__ import annotations

from contextlib import ExitStack

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torchrl.data import Categorical, Composite, Unbounded
from torchrl.envs import EnvBase

from grpo import data
from grpo.atropos.assemble import GroupAssembler, StreamSource
from grpo.atropos.client import AtroposClient
from grpo.atropos.collector import AtroposCollector
from grpo.atropos.convert import (
    GIVEN_ADVANTAGE,
    GIVEN_TOKEN_ADVANTAGE,
    TEMPERATURE,
    ZERO_ADVANTAGE,
    GroupConverter,
)
from grpo.atropos.recompute import RecomputeLogProbs
from grpo.atropos.schemas import Registration
from grpo.atropos.stream import BatchStream

#: Group of the rows that fill up a batch.
NO_GROUP = -1
_FLAG, _WHOLE, _REAL = torch.bool, torch.int64, torch.float32
# What is observed, with its type and its value in rows and columns that fill up the batch. The
# shape is [B, seq_len], [B, 1] or [B].
_WIDE: dict[NestedKey, tuple[torch.dtype, float]] = {
    data.ATTENTION_MASK: (_FLAG, 0), data.ASSISTANT_MASK: (_FLAG, 0), data.PROMPT_MASK: (_FLAG, 0),
    data.LOG_PROBS: (_REAL, 0), data.POLICY_VERSIONS: (_WHOLE, data.NO_VERSION),
    GIVEN_TOKEN_ADVANTAGE: (_REAL, torch.nan)}
_NARROW: dict[NestedKey, tuple[torch.dtype, float]] = {
    data.ROW_MASK: (_FLAG, 0), TEMPERATURE: (_REAL, torch.nan),
    GIVEN_ADVANTAGE: (_REAL, torch.nan), ZERO_ADVANTAGE: (_FLAG, 0)}
_SCALAR: dict[NestedKey, tuple[torch.dtype, float]] = {
    data.GROUP_ID: (_WHOLE, NO_GROUP), data.POLICY_VERSION: (_WHOLE, data.NO_VERSION),
    data.FINISH_REASON: (_WHOLE, 0)}
_TOKENS = (data.TOKENS, data.PROMPT_TOKENS, data.RESPONSE_TOKENS)


class AtroposEnv(EnvBase):
    """Batches of groups that Atropos environments have finished, one step an episode.

    The environments behind the API ask an engine themselves, so what comes has been answered and
    scored: a reset waits for the next batch, the action is empty, and the step gives the reward.
    ``env.rollout(1)[:, 0]`` has the entries of :mod:`grpo.atropos.convert` but those of a reference
    or of a teacher. Token entries, prompts and responses too, are ``seq_len`` wide. Where whole
    groups do not fill the batch, rows of group -1 do, whose masks are all False.

    A batch is acknowledged when the next one is asked for, or by :meth:`close`. The first reset
    registers the trainer.

    Args:
        url: of the API, a hub or ``run-api``.
        rows: of a batch, ``B``; groups larger than that are left out.
        seq_len: longer rows are cut to so many tokens.
        pad_token_id: fill value of the token entries.
        vocab_size: groups with other token ids are left out; None: any is taken.
        temperature: of the trainer, see :class:`~grpo.atropos.convert.GroupConverter`.
        recompute: fills in unknown log-probs; None: a batch that has some is an error.
        num_steps: after so many batches environments stop.
        token: access token of the API.
        timeout: seconds without a new group after which a reset gives up.

    Raises:
        ValueError: for a number out of range, and from :meth:`reset` for unknown log-probs without
            ``recompute``.
        TimeoutError: from :meth:`reset`.

    Examples:
        >>> from torchrl.envs import check_env_specs
        >>> env = AtroposEnv("http://127.0.0.1:8000", rows=32, seq_len=512,
        ...                  pad_token_id=0)                             # doctest: +SKIP
        >>> batch = env.rollout(1)[:, 0]                                 # doctest: +SKIP
    """

    def __init__(
        self, url: str, *, rows: int, seq_len: int, pad_token_id: int,
        vocab_size: int | None = None, temperature: float | None = None,
        recompute: RecomputeLogProbs | None = None, num_steps: int = 1_000_000,
        token: str | None = None, timeout: float = 600.0,
    ) -> None:
        if rows < 1:
            raise ValueError(f"rows={rows} must be at least 1")
        super().__init__(device=torch.device("cpu"), batch_size=torch.Size([rows]))
        self._stream = BatchStream(
            AtroposClient(url, token=token),
            Registration(wandb_group="", wandb_project="", batch_size=rows, max_token_len=seq_len,
                         checkpoint_dir="", save_checkpoint_interval=0, starting_step=0,
                         num_steps=num_steps), poll_seconds=0.05)
        converter = GroupConverter(
            pad_token_id=pad_token_id, seq_len=seq_len, temperature=temperature, distill_topk=0,
            vocab_size=vocab_size)
        self.groups = AtroposCollector(
            GroupAssembler(StreamSource(self._stream), converter, rows=rows),
            recompute=recompute, timeout=timeout)
        self._entries = {
            **{key: ((rows, seq_len), _WHOLE, pad_token_id) for key in _TOKENS},
            **{key: ((rows, seq_len), *kind) for key, kind in _WIDE.items()},
            **{key: ((rows, 1), *kind) for key, kind in _NARROW.items()},
            **{key: ((rows,), *kind) for key, kind in _SCALAR.items()}}
        self._after = {name: ((rows, 1), _FLAG, 0) for name in ("success", "reward_error")}
        self._batch: TensorDict | None = None
        self._at_end: ExitStack | None = None  # None: the trainer is not registered
        self._make_specs()

    def _make_specs(self) -> None:
        rows = self.batch_size[0]
        observation = Composite(shape=self.batch_size)
        for key, (shape, dtype, _) in (self._entries | self._after).items():
            if not isinstance(key, str) and key[0] not in observation.keys():
                observation[key[0]] = Composite(shape=self.batch_size)
            observation[key] = (Categorical(2, shape=shape, dtype=dtype) if dtype is _FLAG
                                else Unbounded(shape=shape, dtype=dtype))
        self.observation_spec = observation
        self.action_spec = Composite(shape=self.batch_size)
        self.reward_spec = Unbounded(shape=(rows, 1), dtype=_REAL)
        self.done_spec = Composite(
            {name: Categorical(2, shape=(rows, 1), dtype=_FLAG)
             for name in ("done", "terminated", "truncated")}, shape=self.batch_size)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs) -> TensorDictBase:
        if tensordict is not None and not tensordict.get("_reset", torch.ones(1)).all():
            raise ValueError("AtroposEnv resets whole batches, because groups come together; got a "
                             "partial '_reset' mask")
        if self._at_end is None:
            self._at_end = ExitStack()
            self._at_end.enter_context(self._stream)
        self._batch = self.groups.collect()
        out = self._observed()
        # Nothing of the outcome is said before the step.
        for name, (shape, dtype, _) in self._after.items():
            out[name] = torch.zeros(shape, dtype=dtype)
        return out

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        out, rows = self._observed(), (self.batch_size[0], 1)
        for name, (shape, dtype, fill) in self._after.items():
            out[name] = _filled(self._batch["next", name], shape, dtype, fill)
        out["reward"] = _filled(self._batch[data.REWARD], rows, _REAL, 0)
        out["truncated"] = _filled(self._batch[data.TRUNCATED], rows, _FLAG, 0)
        out["terminated"] = ~out["truncated"]
        out["done"] = torch.ones(rows, dtype=_FLAG)
        return out

    def _observed(self) -> TensorDict:
        out = TensorDict(batch_size=self.batch_size)
        for key, (shape, dtype, fill) in self._entries.items():
            out[key] = _filled(self._batch[key], shape, dtype, fill)
        return out

    def _set_seed(self, seed: int | None) -> None:
        """Nothing is drawn here; the environments behind the API have seeds of their own."""

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Acknowledge the last batch and give back what was fetched ahead."""
        super().close(raise_if_closed=raise_if_closed)
        if self._at_end is not None:
            self._at_end.close()


def _filled(
    values: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, fill: float
) -> torch.Tensor:
    """Values in the corner of a tensor of a fixed shape."""
    out = torch.full(shape, fill, dtype=dtype)
    out[tuple(slice(size) for size in values.shape)] = values
    return out
