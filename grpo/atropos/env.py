"""Finished groups of Atropos environments as a TorchRL environment: what was done, replayed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torchrl.data import Bounded, Categorical, Composite, Unbounded
from torchrl.envs import EnvBase

from grpo import data
from grpo.atropos import convert
from grpo.atropos.assemble import GroupAssembler, GroupSource
from grpo.atropos.records import Records

RECORDED = "recorded"
#: What the recorded policy did, under the keys at which a policy writes it.
ACTION_KEYS = (
    data.RESPONSE_TOKENS, data.TOKENS, data.ATTENTION_MASK, data.ASSISTANT_MASK, data.LOG_PROBS,
    data.FINISH_REASON, data.POLICY_VERSIONS, data.POLICY_VERSION, data.ROW_MASK,
    convert.TEMPERATURE, convert.GIVEN_ADVANTAGE, convert.GIVEN_TOKEN_ADVANTAGE,
    convert.ZERO_ADVANTAGE)


class AtroposEnv(EnvBase):
    """Pull form: groups that environments have finished, one batch an episode of one step.

    :meth:`reset` waits for enough groups and gives their prompts, and under ``"recorded"`` what the
    policy that served the environments had answered. :class:`RecordedPolicy` makes that the action;
    :meth:`step` then gives the scores. Rows whose action is another one have no reward
    (``reward_error``), because nobody scored it.

    Groups may have any sizes. They stay whole, so a batch may have rows to spare: those have
    ``"active"`` False, ``reward_error`` and a group of their own.

    Args:
        source: where groups come from, see :data:`~grpo.atropos.assemble.GroupSource`.
        rows: ``B``, rows of a batch.
        seq_len: ``P``, ``R`` and ``T``; longer rows are cut and counted.
        pad_token_id: fill value of the token tensors.
        vocab_size: token ids are below it.
        temperature: see :class:`~grpo.atropos.convert.GroupConverter`.
        max_staleness: see :class:`~grpo.atropos.convert.GroupConverter`.
        version: the policy's present version.
        records: what the policy sampled, to restore log-probs and versions from.
        ref_log_probs: also give ``("next", "ref_log_probs", "full")``; all groups must bring them.
        distill_topk: also give so many of a teacher's most likely tokens; 0: none.
        timeout: seconds that :meth:`reset` waits for a full batch.

    Raises:
        TimeoutError: from :meth:`reset`; groups that came in time stay for the next one.

    Examples:
        >>> from torchrl.envs import check_env_specs
        >>> from grpo.atropos.schemas import ScoredGroup
        >>> group = ScoredGroup(tokens=[[5, 6], [5, 7]], masks=[[-100, 6], [-100, 7]],
        ...                     scores=[1.0, 0.0], inference_logprobs=[[1.0, -0.5], [1.0, -2.0]])
        >>> env = AtroposEnv(lambda timeout: [group], rows=2, seq_len=4, pad_token_id=0,
        ...                  vocab_size=16)
        >>> env.rollout(1, RecordedPolicy())["next", "reward"].flatten().tolist()
        [1.0, 0.0]
    """

    def __init__(
        self,
        source: GroupSource,
        *,
        rows: int,
        seq_len: int,
        pad_token_id: int,
        vocab_size: int,
        temperature: float | None = None,
        max_staleness: int | None = None,
        version: Callable[[], int] = lambda: 0,
        records: Records | None = None,
        ref_log_probs: bool = False,
        distill_topk: int = 0,
        timeout: float = 600.0,
    ) -> None:
        if not timeout > 0:
            raise ValueError(f"timeout={timeout} must be positive seconds")
        super().__init__(device=torch.device("cpu"), batch_size=torch.Size([rows]))
        self.assembler = GroupAssembler(
            source,
            convert.GroupConverter(
                pad_token_id=pad_token_id, seq_len=seq_len, temperature=temperature,
                max_staleness=max_staleness, distill_topk=distill_topk),
            rows=rows, version=version, records=records)
        self.seq_len, self.timeout = seq_len, timeout
        self.ref_log_probs, self.distill_topk = ref_log_probs, distill_topk
        self.action_keys_of_record = ACTION_KEYS + (
            (data.DISTILL_IDS, data.DISTILL_LOG_PROBS) if distill_topk else ())
        self._batch: TensorDict | None = None
        self._make_specs(vocab_size)

    def _make_specs(self, vocabulary: int) -> None:
        rows, width = self.batch_size[0], self.seq_len

        def tokens(*shape: int) -> Bounded:
            return Bounded(0, vocabulary - 1, shape=(rows, *shape), dtype=torch.int64)

        def flags(*shape: int) -> Categorical:
            return Categorical(2, shape=(rows, *shape), dtype=torch.bool)

        def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Unbounded:
            return Unbounded(shape=(rows, *shape), dtype=dtype)

        batch = {"shape": self.batch_size}
        recorded = Composite(
            tokens=Composite(response=tokens(width), full=tokens(width), **batch),
            masks=Composite(all_attention_mask=flags(width), all_assistant_mask=flags(width),
                            **batch),
            log_probs=Composite(full=numbers(width), **batch),
            policy_versions=Composite(full=numbers(width, dtype=torch.int64), **batch),
            finish_reason=numbers(dtype=torch.int64), policy_version=numbers(dtype=torch.int64),
            row_mask=flags(1), temperature=numbers(1),
            given=Composite(advantage=numbers(1), token_advantage=numbers(width),
                            zero_advantage=flags(1), **batch), **batch)
        if self.distill_topk:
            recorded["distill"] = Composite(
                token_ids=tokens(width, self.distill_topk),
                log_probs=numbers(width, self.distill_topk), **batch)
        self.observation_spec = Composite(
            tokens=Composite(prompt=tokens(width), **batch),
            masks=Composite(prompt_attention_mask=flags(width), **batch),
            group_id=numbers(dtype=torch.int64), active=flags(1), reward_error=flags(1),
            success=flags(1), recorded=recorded, **batch)
        if self.ref_log_probs:
            self.observation_spec["ref_log_probs"] = Composite(full=numbers(width), **batch)
        self.action_spec = Composite(tokens=Composite(response=tokens(width), **batch), **batch)
        self.reward_spec = numbers(1)
        self.done_spec = Composite(done=flags(1), terminated=flags(1), truncated=flags(1), **batch)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs) -> TensorDictBase:
        if tensordict is not None and not tensordict.get("_reset", torch.ones(1)).all():
            raise ValueError("AtroposEnv resets whole batches, because groups stay whole; got a "
                             "partial '_reset' mask")
        self._wait()
        batch = self.assembler.batch(width=self.seq_len)
        if self.ref_log_probs and data.REF_LOG_PROBS not in batch.keys(True):
            raise ValueError("ref_log_probs=True, but not every group brings ref_logprobs; set it "
                             "to False and score the batch with a reference model")
        self._batch = self._filled(batch)
        out = self._observation()
        out["reward_error"] = ~self._batch["active"]
        out["success"] = torch.zeros_like(out["active"])
        return out

    def _wait(self) -> None:
        deadline = time.monotonic() + self.timeout
        while not self.assembler.poll(max(0.0, deadline - time.monotonic())):
            if time.monotonic() >= deadline:
                raise TimeoutError(
                    f"{self.assembler.waiting_rows} of {self.batch_size[0]} rows arrived within "
                    f"{self.timeout:g} s; see the environments' logs: are they running, do all "
                    "their groups have equal scores?")

    def _filled(self, batch: TensorDict) -> TensorDict:
        """The batch with rows that do nothing after its own, up to the environment's size."""
        batch["active"] = torch.ones(len(batch), 1, dtype=torch.bool)
        spare = self.batch_size[0] - len(batch)
        if not spare:
            return batch
        idle = torch.zeros_like(batch[:1]).expand(spare).clone()
        for key in (data.PROMPT_TOKENS, data.RESPONSE_TOKENS, data.TOKENS):
            idle[key].fill_(self.assembler.converter.pad_token_id)
        for key in (data.PROMPT_MASK, data.ATTENTION_MASK):
            idle[key][:, 0] = True
        for key in (convert.GIVEN_ADVANTAGE, convert.GIVEN_TOKEN_ADVANTAGE):
            idle[key].fill_(math.nan)
        if self.distill_topk:
            idle[data.DISTILL_LOG_PROBS].fill_(-math.inf)
        idle[data.POLICY_VERSIONS].fill_(data.NO_VERSION)
        idle[data.POLICY_VERSION].fill_(self.assembler.version())
        first = self.assembler.converter.next_group
        self.assembler.converter.next_group += spare
        idle[data.GROUP_ID] = first + torch.arange(spare)
        return torch.cat([batch, idle])

    def _observation(self) -> TensorDict:
        out = self._batch.select(data.PROMPT_TOKENS, data.PROMPT_MASK, data.GROUP_ID, "active")
        out[RECORDED] = self._batch.select(*self.action_keys_of_record)
        if self.ref_log_probs:
            out["ref_log_probs"] = self._batch["next", "ref_log_probs"]
        return out.clone()  # policies may write into what they get

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        response_BR = tensordict[data.RESPONSE_TOKENS].to(self.device)
        scored = (response_BR == self._batch[data.RESPONSE_TOKENS]).all(-1, keepdim=True)
        out = self._observation()
        out["reward"] = self._batch[data.REWARD].where(scored, 0.0)
        out["reward_error"] = ~(scored & self._batch["active"])
        out["success"] = self._batch[data.SUCCESS] & scored
        out["truncated"] = self._batch[data.TRUNCATED].clone()
        out["terminated"] = ~out["truncated"]
        out["done"] = torch.ones_like(out["truncated"])
        return out

    def _set_seed(self, seed: int | None) -> None:
        """Environments outside this process draw their own numbers."""

    def state_dict(self) -> dict[str, Any]:
        """Counters, for checkpoints."""
        return self.assembler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.assembler.load_state_dict(state)


class RecordedPolicy(TensorDictModuleBase):
    """Do what was recorded: copy ``"recorded"`` to where a policy writes its action.

    Args:
        distill_topk: whether the environment also records a teacher's tokens (as there).
    """

    def __init__(self, *, distill_topk: int = 0) -> None:
        super().__init__()
        self.in_keys = [RECORDED]
        self.out_keys = [*ACTION_KEYS]
        if distill_topk:
            self.out_keys += [data.DISTILL_IDS, data.DISTILL_LOG_PROBS]
        self.calls = 0

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.calls += 1
        return tensordict.update(tensordict[RECORDED])
