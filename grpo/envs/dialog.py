"""Dialogs: what is said to the model after its turn, and what stands in the batch then.

A conversation is never rendered anew. What the engine sampled stays as it is, and the tokens of the
next message are laid behind it, as the chat template puts them after a turn of the model. Rendering
the whole again would change tokens that were sampled: templates drop the thoughts of earlier turns,
and a tokenizer cuts text in its own way. Between the turns of the model stand the tokens of others,
which have no log-probs and are not trained.
"""

from __future__ import annotations

import json
import logging
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, TypeAlias

from grpo.envs.rewards.batch import RewardBatch
from grpo.envs.rewards.completion import Completion
from grpo.envs.rewards.registry import imported
from grpo.envs.rewards.scorer import RewardScorer
from grpo.envs.tasks.base import Partner, Problem
from grpo.system.deadline import LateError, call_with_deadline

logger = logging.getLogger(__name__)
Message: TypeAlias = Mapping[str, Any]  # with "role" and "content"
RETRY = "That is not right. Check each step, find the mistake and give your answer again."
#: What is said at a time: by the user if it is a text.
Reply: TypeAlias = str | Message | Sequence[Message]
_MARK = "0MODEL0TURN0"  # stands for what the model said while a message is rendered


class UnscoredError(RuntimeError):
    """A turn got no reward, so that nobody knows whether it is right; the message says why."""


@dataclass(frozen=True)
class DialogState:
    """What a step gets to see after a turn of the model.

    Attributes:
        problem: what the conversation is about.
        completions: what the model has said, turn by turn; the last is to be answered.
        replies: what was answered to those before, one fewer.
    """

    problem: Problem
    completions: tuple[str, ...]
    replies: tuple[Reply, ...]
    _score: Callable[[Sequence[str], Sequence[Problem]], RewardBatch] = field(repr=False)

    @cached_property
    def success(self) -> bool:
        """Whether the last turn solves the problem by the run's reward, which is asked for it.

        Raises:
            UnscoredError: if it has no reward; the :class:`Dialog` then ends the conversation.
        """
        scores = self._score([self.completions[-1]], [self.problem])
        if scores.messages:
            raise UnscoredError(scores.messages[0])
        return bool(scores.success[0])


#: The next message, or several that stand together; None ends the conversation.
Step: TypeAlias = Callable[[DialogState], Reply | None]


def retry(state: DialogState) -> str | None:
    """The built-in step: an answer that is wrong may be given again."""
    return None if state.success else RETRY


def environment(state: DialogState) -> None:
    """The built-in step of problems with a partner, which a :class:`Dialog` asks itself.

    Raises:
        ValueError: for a problem without one.
    """
    raise ValueError(f"env.step=environment: problem {state.problem.id!r} has nobody who answers "
                     "the model; use env=verifiers, or another step")


def named_step(name: str) -> Step:
    """The step of this name, ``retry``, ``environment``, or at ``"package.module:function"``.

    Raises:
        ValueError: if there is none.
    """
    if name in ("retry", "environment"):
        return {"retry": retry, "environment": environment}[name]
    if ":" not in name:
        raise ValueError(f"there is no step {name!r}; give retry, environment, or a function of "
                         "your own by its import path, 'package.module:function'")
    return imported(name, "step")


@dataclass
class Talk:
    """One conversation: what stands behind its prompt, and its turns as texts."""

    problem: Problem
    tokens: list[int] = field(default_factory=list)  # of all turns and of what lies between them
    sampled: list[bool] = field(default_factory=list)  # whether the model sampled each of them
    log_probs: list[float] = field(default_factory=list)  # of each; 0 where it was not sampled
    versions: list[int] = field(default_factory=list)  # of the weights, of sampled tokens alone
    turns: list[list[int]] = field(default_factory=list)  # tokens of each, the end token included
    completions: list[Completion] = field(default_factory=list)
    replies: list[Reply] = field(default_factory=list)
    partner: Partner | None = None  # who answers, in problems that have somebody
    truncated: bool = False  # whether the length limit ended it
    open: bool = True  # whether the model is to speak
    unscored: str | None = None  # why the step could not know what the last turn is worth

    def add_turn(self, tokens: list[int], log_probs: list[float], versions: list[int],
                 truncated: bool) -> None:
        """What the model has sampled."""
        self.turns.append(tokens)
        self.tokens += tokens
        self.sampled += [True] * len(tokens)
        self.log_probs += log_probs
        self.versions += versions
        self.truncated = truncated

    def add_reply(self, reply: Reply, tokens: list[int]) -> None:
        """What is said to the model, which speaks next."""
        self.replies.append(reply)
        self.tokens += tokens
        self.sampled += [False] * len(tokens)
        self.log_probs += [0.0] * len(tokens)


class Dialog:
    """Answers the model until a step has nothing more to say.

    Args:
        step: makes the next message of a :class:`DialogState`.
        tokenizer: of the model; with a chat template, messages are laid out by it.
        score: what :attr:`DialogState.success` asks.
        max_steps: turns of the model in a conversation, at most.
        max_tokens: of a conversation behind its prompt, those of messages included.
        eos_token_ids: tokens that end a turn.
        workers: steps that run at a time; 1: one after the other, in this thread.

    Examples:
        >>> def step(state):
        ...     return "And twice that?" if len(state.completions) < 2 else None
        >>> dialog = Dialog(step, tokenizer, score, max_steps=2, max_tokens=64,
        ...                 eos_token_ids=(1,))                              # doctest: +SKIP
    """

    def __init__(
        self, step: Step, tokenizer: Any, score: RewardScorer, *, max_steps: int, max_tokens: int,
        eos_token_ids: Sequence[int], workers: int = 1,
    ) -> None:
        self.step, self.tokenizer, self.score = step, tokenizer, score
        self.max_steps, self.max_tokens = max_steps, max_tokens
        self.eos_token_ids = frozenset(eos_token_ids)
        self._threads = ThreadPoolExecutor(workers, "dialog") if workers > 1 else None
        self._tried = self._asks_reward = False
        self._concluded: defaultdict[tuple[str, tuple[int, ...]], deque[Partner]] = (
            defaultdict(deque))
        self._rendered = lru_cache(maxsize=4096)(self._render)

    def answer(self, talks: Sequence[Talk]) -> None:
        """Give each conversation its next message, or close it, after a turn of the model.

        It is closed, too, where a step asks whether the turn is right and the reward does not say.
        Its row then has the reward, or the fault, that the turn is given as the last one.

        Raises:
            Exception: what a step raises, with the problem named in a note.
            LateError: for a step that takes more than twice the seconds of a reward.
            TypeError: for a message that is none, or has no token.
        """
        for talk, reply in zip(talks, self._replies(talks), strict=True):
            tokens = [] if reply is None else self._tokens(talk, reply)
            if reply is None:
                talk.open = False
            elif len(talk.tokens) + len(tokens) < self.max_tokens:
                talk.add_reply(reply, tokens)
            else:
                talk.open, talk.truncated = False, True
            if talk.partner is not None and not talk.open:
                talk.partner.stop(seconds=self.score.timeout)
                self._concluded[talk.problem.id, tuple(talk.tokens)].append(talk.partner)
        if unscored := [talk.unscored for talk in talks if talk.unscored]:
            logger.warning("%d of %d conversations end, because env.step asks whether their turn "
                           "is right and it got no reward; first: %s", len(unscored), len(talks),
                           unscored[0])

    def concluded(self, problem: Problem, tokens: Sequence[int]) -> Problem:
        """The problem of a conversation that is over, whose partner is now its verifier.

        Args:
            problem: what it was about.
            tokens: all behind the prompt, of every side. Conversations of the same tokens are
                handed out one after the other.
        """
        if problem.partner is None or self.step is not environment:
            return problem
        key = problem.id, tuple(tokens)
        partner = self._concluded[key].popleft()
        if not self._concluded[key]:
            del self._concluded[key]
        return replace(problem, verifier=lambda completion: partner.score())

    def abandon(self, talks: Sequence[Talk]) -> None:
        """Nobody will ask what these conversations are worth: end them and keep nothing."""
        for talk in talks:
            if talk.partner is None:
                continue
            if talk.open:
                talk.partner.stop(seconds=self.score.timeout)
            key = talk.problem.id, tuple(talk.tokens)
            waiting = self._concluded.get(key, ())
            if talk.partner in waiting:
                waiting.remove(talk.partner)
            if not waiting:
                self._concluded.pop(key, None)

    def said(self, turn: list[int]) -> list[int]:
        """Tokens of a turn before its end token."""
        end = next((i for i, token in enumerate(turn) if token in self.eos_token_ids), len(turn))
        return turn[:end]

    def _replies(self, talks: Sequence[Talk]) -> list[Reply | None]:
        if self._threads is None:
            return [self._reply(talk) for talk in talks]
        # The first call of a reward function runs alone, see RewardScorer.
        first = [] if self._tried else [self._reply(talks[0])]
        self._tried = True
        in_order = self._asks_reward and self.score.in_order
        others = map if in_order else self._threads.map
        return [*first, *others(self._reply, talks[len(first):])]

    def _rewards(self, completions: Sequence[str], problems: Sequence[Problem]) -> RewardBatch:
        self._asks_reward = True
        return self.score(completions, problems)

    def _reply(self, talk: Talk) -> Reply | None:
        """The next message; None after the last turn and after one that was cut."""
        text = self.tokenizer.decode(self.said(talk.turns[-1]), skip_special_tokens=True)
        talk.completions.append(Completion(text, token_ids=talk.turns[-1]))
        if self.step is environment and talk.problem.partner is not None:
            return self._reply_of_partner(talk, text)
        if talk.truncated or len(talk.turns) == self.max_steps:
            return None
        state = DialogState(talk.problem, tuple(talk.completions), tuple(talk.replies),
                            self._rewards)
        try:
            # As long as a reward, and as the one that it may ask for. The built-in step asks that
            # alone, which has a deadline of its own and may wait for its turn before.
            reply = retry(state) if self.step is retry else call_with_deadline(
                self.step, state, seconds=2 * self.score.timeout)
        except LateError as error:
            raise LateError(f"env.step {error} on turn {len(talk.turns)} of problem "
                            f"{talk.problem.id!r}, twice env.reward_timeout; give what it waits "
                            "for a deadline of its own, or raise env.reward_timeout") from None
        except UnscoredError as error:
            talk.unscored = str(error)
            return None
        except Exception as error:
            error.add_note(f"while env.step answered turn {len(talk.turns)} of problem "
                           f"{talk.problem.id!r}")
            raise
        if not (reply is None or isinstance(reply, str)
                or all(map(_is_message, _listed(reply)))):
            raise TypeError(f"env.step returned {reply!r} for problem {talk.problem.id!r}; return "
                            "the next message, as a text or as {'role': ..., 'content': ...}, a "
                            "list of such messages, or None to end the conversation; the content "
                            "of a message is a text, and further keys are what JSON has")
        return reply

    def _reply_of_partner(self, talk: Talk, text: str) -> Reply | None:
        """It is told of every turn, the last one and one that was cut included."""
        if talk.partner is None:
            talk.partner = talk.problem.partner()
        reply = talk.partner.reply(text, truncated=talk.truncated, seconds=self.score.timeout)
        return None if talk.truncated or len(talk.turns) == self.max_steps else reply

    def _tokens(self, talk: Talk, reply: Reply) -> list[int]:
        """Tokens of what is said, and of what invites the model to speak again."""
        messages = [{"role": "user", "content": reply}] if isinstance(reply, str) else (
            _listed(reply))
        said = json.dumps([dict(message) for message in messages])
        if not isinstance(talk.problem.prompt, str):
            return self._rendered(True, said, talk.turns[-1][-1])
        tokens = self._rendered(False, said, None)
        if not tokens:  # the next turn would be read as a part of this one
            raise TypeError(f"env.step returned {reply!r} for problem {talk.problem.id!r}, which "
                            "has no token; return a message that has, or None to end the "
                            "conversation")
        return tokens

    def _render(self, chat: bool, said: str, end: int | None) -> list[int]:
        """Of messages in JSON: by the chat template in a ``chat``, without the end token ``end``,
        which the model has sampled itself."""
        said = json.loads(said)
        if not chat:
            text = "".join(message["content"] for message in said)
            return self.tokenizer(text, add_special_tokens=False)["input_ids"]
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK},
                    *said]
        text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True,
                                                  tokenize=False)
        _, found, behind = text.partition(_MARK)
        if not found:
            raise ValueError("the chat template of model.name leaves out a turn of the model that "
                             "another message follows, so it cannot lay out a dialog; set env.step "
                             "to null, or choose another model")
        ended = self.tokenizer.decode([end]) if end in self.eos_token_ids else ""
        # Some templates set a space before it, which the model has not sampled.
        if ended and (ending := behind.lstrip(" ")).startswith(ended):
            behind = ending.removeprefix(ended)
        return self.tokenizer(behind, add_special_tokens=False)["input_ids"]


def _is_message(one: Any) -> bool:
    """Whether a chat template can lay it out."""
    if not isinstance(one, Mapping) or not all(
            isinstance(one.get(key), str) for key in ("role", "content")):
        return False
    try:
        json.dumps(dict(one))
    except (TypeError, ValueError):
        return False
    return True


def _listed(reply: Any) -> Sequence[Any]:
    """Messages that are said together; of what is none, itself."""
    return reply if isinstance(reply, list | tuple) and reply else [reply]
