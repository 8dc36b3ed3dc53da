"""The environment of a task: prompts from its problems, rewards from its verifier."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Bounded, Categorical, Composite, Unbounded
from torchrl.envs import EnvBase

from grpo import data
from grpo.envs.dialog import Dialog
from grpo.envs.prompts import Prompt, PromptStream
from grpo.envs.rewards.batch import RewardBatch, Row
from grpo.envs.rewards.completion import Completion
from grpo.envs.rewards.scorer import RewardScorer
from grpo.envs.tasks.base import Problem

logger = logging.getLogger(__name__)


class _Response(NamedTuple):
    """What is scored of a row."""

    tokens: list[int]  # before the end token, in a dialog of the last turn
    end: list[int]  # that token, if there is one
    talk: list[int] | None  # in a dialog, all behind the prompt


class _Begun(NamedTuple):
    """A group whose rewards have been started."""

    rows: list[_Response]
    wait: Callable[[], RewardBatch]


class VerifiableEnv(EnvBase):
    """Prompts as observations, whole responses as actions, one step an episode.

    In a ``dialog`` the response is a whole conversation, and the reward is that of its last turn.

    All entries are dense tensors (see :mod:`grpo.data`), so the environment runs under TorchRL's
    collectors as well as ours.

    Args:
        prompts: what to draw from, see :func:`grpo.envs.prompts.render_all`.
        score: groups are scored as they are finished, see :meth:`row_finished`.
        tokenizer: turns response tokens into text for the reward.
        num_prompts: groups a batch.
        group_size: rows of a group, which have the same prompt.
        max_prompt_tokens: ``P``, the padded width of prompts.
        max_response_tokens: ``R``, the padded width of responses.
        eos_token_ids: tokens that end a response.
        seed: of the order of prompts.
        shuffle: False draws the prompts in order, for evaluation.
        dialog: what is said to the model after its turn, see
            :func:`~grpo.policies.converse.converse`; None: nothing, it has one turn.

    Raises:
        ValueError: for a group size below 2 with training (shuffled) prompts.

    Examples:
        >>> from torchrl.envs import check_env_specs
        >>> env = VerifiableEnv(prompts, score, tokenizer, num_prompts=4, group_size=8,
        ...     max_prompt_tokens=16, max_response_tokens=8,
        ...     eos_token_ids=(1,))                                      # doctest: +SKIP
        >>> batch = env.rollout(1, policy)                               # doctest: +SKIP
    """

    def __init__(
        self, prompts: Sequence[Prompt], score: RewardScorer, tokenizer: Any, *, num_prompts: int,
        group_size: int, max_prompt_tokens: int, max_response_tokens: int,
        eos_token_ids: tuple[int, ...], seed: int = 0, shuffle: bool = True,
        dialog: Dialog | None = None,
    ) -> None:
        if shuffle and group_size < 2:
            raise ValueError(f"env.repeats={group_size}: a group needs at least 2 completions, "
                             "because an advantage is relative to the other members of the group")
        if num_prompts < 1:
            raise ValueError(f"env.num_envs={num_prompts} must be at least 1")
        super().__init__(device=torch.device("cpu"),
                         batch_size=torch.Size([num_prompts * group_size]))
        self.stream = PromptStream(prompts, seed=seed, shuffle=shuffle)
        self.score, self.tokenizer, self.dialog = score, tokenizer, dialog
        self.num_prompts, self.group_size = num_prompts, group_size
        self.pad_token_id = int(tokenizer.pad_token_id)
        self.eos_token_ids = torch.tensor(eos_token_ids, dtype=torch.int64)
        self._ends, self._width = frozenset(eos_token_ids), max_response_tokens
        self.groups_started = 0
        self.reward_errors = 0
        self.failures: dict[str, str] = {}  # of the last step, as of RewardBatch
        self.responses: list[_Response] = []  # of the last step, a row each
        self._current: list[Prompt] = []
        self._sought: tuple[int, ...] = ()
        self._finished: dict[int, _Response] = {}  # by row
        self._begun: dict[int, _Begun] = {}  # first row of a group -> its scores to come
        self._make_specs(max_prompt_tokens, max_response_tokens, len(tokenizer))

    @property
    def current_problems(self) -> list[Problem]:
        """The problem of each row of the current batch."""
        return [prompt.problem for prompt in self._current]

    @property
    def several_rewards(self) -> tuple[str, ...]:
        """Names of the rewards that are summed, which are reported beside the sum; one is not."""
        return self.score.labels if len(self.score.labels) > 1 else ()

    def _make_specs(self, prompt_width: int, response_width: int, vocabulary: int) -> None:
        rows = self.batch_size[0]

        def tokens(width: int) -> Bounded:
            return Bounded(0, vocabulary - 1, shape=(rows, width), dtype=torch.int64)

        def flags(*shape: int) -> Categorical:
            return Categorical(2, shape=(rows, *shape), dtype=torch.bool)

        batch = {"shape": self.batch_size}
        parts = {label: Unbounded(shape=(rows, 1)) for label in self.several_rewards}
        observation = Composite(
            tokens=Composite(prompt=tokens(prompt_width), **batch),
            masks=Composite(prompt_attention_mask=flags(prompt_width), **batch),
            group_id=Unbounded(shape=(rows,), dtype=torch.int64),
            reward_error=flags(1), success=flags(1),
            reward_fault=Unbounded(shape=(rows, 1), dtype=torch.int64), **batch)
        if parts:
            observation["reward_parts"] = Composite(parts, **batch)
        self.observation_spec = observation
        self.action_spec = Composite(
            tokens=Composite(response=tokens(response_width), **batch), **batch)
        self.reward_spec = Unbounded(shape=(rows, 1), dtype=torch.float32)
        self.done_spec = Composite(done=flags(1), terminated=flags(1), truncated=flags(1), **batch)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs) -> TensorDictBase:
        if tensordict is not None and not tensordict.get("_reset", torch.ones(1)).all():
            raise ValueError("VerifiableEnv resets whole batches, because a group starts together; "
                             "got a partial '_reset' mask")
        numbers = self._sought or range(self.groups_started,
                                        self.groups_started + self.num_prompts)
        prompts = ([self.stream.at(number) for number in numbers] if self._sought
                   else self.stream.take(self.num_prompts))
        self._sought = ()
        self._current = [prompt for prompt in prompts for _ in range(self.group_size)]
        self._finished, self._begun = {}, {}
        rows, width = self.batch_size[0], self.observation_spec[data.PROMPT_TOKENS].shape[-1]
        out = TensorDict({}, batch_size=self.batch_size)
        sizes = torch.tensor([len(prompt.tokens) for prompt in self._current])
        out[data.PROMPT_TOKENS] = data.pad_rows([p.tokens for p in self._current], width,
                                                self.pad_token_id)
        out[data.PROMPT_MASK] = torch.arange(width) < sizes[:, None]
        # Counted on over the whole run, so that rows of different batches never share a group.
        out[data.GROUP_ID] = torch.tensor(numbers).repeat_interleave(self.group_size)
        self.groups_started = numbers[-1] + 1
        nothing = RewardBatch.of_rows([Row()] * rows, self.score.labels)
        return out.update(self._entries(nothing))

    def row_finished(self, row: int, tokens: list[int], talk: list[int] | None = None) -> None:
        """A policy has finished a row of the batch: the last of a group starts its rewards.

        They run while other groups are generated; :meth:`step` waits for them. ``tokens`` are those
        of the response, in a dialog of its last turn, end token included; ``talk`` is all of it.
        """
        self._finished[row] = _Response(*self._read_one(tokens), talk)
        first = row - row % self.group_size
        group = range(first, first + self.group_size)
        if self.group_size > 1 and all(row in self._finished for row in group):
            self._begun[first] = self._begin(first, [self._finished[row] for row in group])

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        response_BR = tensordict[data.RESPONSE_TOKENS].cpu()
        said, ended_B = self._read(
            response_BR if self.dialog is None else self._last_turns(tensordict))
        talks = [None] * len(said) if self.dialog is None else self._talks(tensordict)
        rows = [_Response(*turn, talk) for turn, talk in zip(said, talks, strict=True)]
        self.responses = rows
        finish_reason = tensordict.get(data.FINISH_REASON, None)
        if finish_reason is not None:  # the policy knows; an action without it is read for EOS
            ended_B = finish_reason.cpu() == data.FINISH_STOP
        scores = self._score(rows)
        self.failures = scores.failures
        self.reward_errors += len(scores.messages)
        if scores.messages:
            logger.warning("%d of %d completions got no reward and are left out; first: %s",
                           len(scores.messages), self.batch_size[0], scores.messages[0])
        out = TensorDict({}, batch_size=self.batch_size)
        for key in (data.PROMPT_TOKENS, data.PROMPT_MASK, data.GROUP_ID):
            out[key] = tensordict[key]
        out["reward"] = scores.reward[:, None]
        out.update(self._entries(scores))
        out["truncated"] = ~ended_B[:, None]
        out["terminated"] = ended_B[:, None]
        out["done"] = torch.ones_like(out["terminated"])
        return out

    def _entries(self, scores: RewardBatch) -> dict[str, Any]:
        """What is observed of the scores, besides the reward."""
        entries = {"reward_error": scores.error[:, None], "success": scores.success[:, None],
                   "reward_fault": scores.fault[:, None]}
        if self.several_rewards:
            entries["reward_parts"] = TensorDict(
                {label: part[:, None] for label, part in scores.parts.items()}, self.batch_size)
        return entries

    def _score(self, rows: list[_Response]) -> RewardBatch:
        """Scores of all rows, group by group; single completions are no groups and come at once."""
        each = self.group_size if self.group_size > 1 else len(rows)
        begun = []
        for first in range(0, len(rows), each):
            part, ahead = rows[first:first + each], self._begun.get(first)
            begun.append(ahead if ahead and ahead.rows == part else self._begin(first, part))
        return RewardBatch.joined([group.wait() for group in begun])

    def _begin(self, first: int, rows: list[_Response]) -> _Begun:
        problems = [prompt.problem for prompt in self._current[first:first + len(rows)]]
        if self.dialog is not None:
            problems = [self.dialog.concluded(problem, row.talk)
                        for problem, row in zip(problems, rows, strict=True)]
        # Arrays, because of lists Transformers looks at every number.
        texts = self.tokenizer.batch_decode([np.array(row.tokens, dtype=np.int64) for row in rows],
                                            skip_special_tokens=True)
        completions = [Completion(text, token_ids=row.tokens + row.end)
                       for text, row in zip(texts, rows, strict=True)]
        return _Begun(rows, self.score.start(completions, problems))

    def _read(
        self, response_BR: torch.Tensor
    ) -> tuple[list[tuple[list[int], list[int]]], torch.Tensor]:
        """Tokens of each response before its first end token and that token, and whether it has
        one."""
        is_eos = torch.isin(response_BR, self.eos_token_ids)
        sizes = (is_eos.int().cumsum(-1) == 0).sum(-1).tolist()
        rows = [(row[:size], row[size:size + 1])
                for row, size in zip(response_BR.tolist(), sizes, strict=True)]
        for said, end in rows:  # one that was cut may be shorter than others
            while not end and said and said[-1] == self.pad_token_id:
                said.pop()
        return rows, is_eos.any(-1)

    def _read_one(self, tokens: list[int]) -> tuple[list[int], list[int]]:
        """What :meth:`_read` finds of one response, at a hundredth of its time."""
        for number, token in enumerate(tokens):
            if token in self._ends:
                return tokens[:number], [token]
        if len(tokens) < self._width and self.pad_token_id in self._ends:
            return tokens[:], [self.pad_token_id]  # as it looks in the padded batch
        size = len(tokens)
        while size and tokens[size - 1] == self.pad_token_id:
            size -= 1
        return tokens[:size], []

    def _last_turns(self, batch: TensorDictBase) -> torch.Tensor:
        """The tokens that were sampled last in each row, behind those of others, ``[B, R]``."""
        mask_BT, width = batch[data.ASSISTANT_MASK].cpu(), batch[data.RESPONSE_TOKENS].shape[-1]
        column_T = torch.arange(mask_BT.shape[-1])
        last_B = column_T.where(mask_BT, -1).amax(-1, keepdim=True)
        others_BT = ~mask_BT & (column_T < last_B)
        start_B = column_T.where(others_BT, -1).amax(-1, keepdim=True)
        rows = [tokens[keep].tolist() for tokens, keep in zip(
            batch[data.TOKENS].cpu(), mask_BT & (column_T > start_B), strict=True)]
        return data.pad_rows(rows, width, self.pad_token_id)

    @staticmethod
    def _talks(batch: TensorDictBase) -> list[list[int]]:
        """All from the first sampled token of each row to its last."""
        mask_BT = batch[data.ASSISTANT_MASK].cpu()
        kept_BT = (mask_BT.cumsum(-1) > 0) & (mask_BT.flip(-1).cumsum(-1).flip(-1) > 0)
        return [tokens[keep].tolist() for tokens, keep in zip(
            batch[data.TOKENS].cpu(), kept_BT, strict=True)]

    def seek(self, *groups: int) -> None:
        """Let the next reset begin with the group of this number of the run, or, where as many are
        given as a batch has, be of these.

        Raises:
            ValueError: for another number of them.
        """
        if len(groups) not in (1, self.num_prompts):
            raise ValueError(f"{len(groups)} groups are sought, but a batch has "
                             f"{self.num_prompts}; give its first, or all")
        self._sought = groups if len(groups) > 1 else ()
        self.stream.seek(groups[0])
        self.groups_started = groups[0]

    def _set_seed(self, seed: int | None) -> None:
        if seed is not None:
            self.stream = PromptStream(self.stream.prompts, seed=seed, shuffle=self.stream.shuffle)

    def state_dict(self) -> dict[str, Any]:
        """Position in the data and counters, for checkpoints."""
        return {"stream": self.stream.state_dict(), "groups_started": self.groups_started,
                "reward_errors": self.reward_errors}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.stream.load_state_dict(state["stream"])
        self.groups_started = state["groups_started"]
        self.reward_errors = state["reward_errors"]
