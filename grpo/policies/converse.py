"""A policy in conversation: turn after turn, until nobody has anything more to say to it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace

from tensordict import TensorDictBase

from grpo import data
from grpo.envs.dialog import Dialog, Talk
from grpo.envs.tasks.base import Problem
from grpo.envs.verifiable import VerifiableEnv
from grpo.policies.base import Completions, Policy, first_of_rows

#: Samples a turn of the rows that go on: their tokens so far, the most that any of them has room
#: for, and the turn's number, which tells its random numbers from those of others. The result is
#: what a policy writes.
Speak = Callable[[list[list[int]], int, int], TensorDictBase]
#: Is told of a row whose conversation is over: its number, the tokens of its last turn, and all
#: behind its prompt.
TalkListener = Callable[[int, list[int], list[int]], None]


def respond(policy: Policy, env: VerifiableEnv, batch: TensorDictBase) -> TensorDictBase:
    """The policy's responses to what an environment has just asked, or their conversations; its
    rewards are begun as groups are finished."""
    if env.dialog is None:
        return policy.stream(batch, env.row_finished)
    return converse(policy, batch, env.dialog, env.current_problems, on_row=env.row_finished)


def converse(
    policy: Policy, batch: TensorDictBase, dialog: Dialog, problems: Sequence[Problem], *,
    on_row: TalkListener | None = None,
) -> TensorDictBase:
    """Let a policy hold the conversations of a batch, and write them into it.

    A turn ends by an end token, and the next one is sampled behind the very tokens of those before.
    All turns and messages of a row share ``policy.sampling.max_tokens``.

    Args:
        policy: as for a call; its number of calls grows by one a turn.
        batch: with prompts, as a policy reads it.
        dialog: what answers.
        problems: of each row.
        on_row: is told of each row whose conversation is over.

    Returns:
        ``batch`` as a call would return it. ``tokens.response`` are all turns with the messages
        between them, ``masks.all_assistant_mask`` is True on what the policy sampled.
    """
    def speak(prompts: list[list[int]], limit: int, turn: int) -> TensorDictBase:
        speaker = copy.copy(policy)
        speaker.sampling = replace(policy.sampling, max_tokens=limit)
        said = speaker(policy.pad_prompts(prompts))
        policy.calls = speaker.calls
        return said

    return policy.write(batch, hold(
        speak, policy.prompts_of(batch), dialog, problems, max_tokens=policy.sampling.max_tokens,
        on_row=on_row))


def hold(
    speak: Speak, prompts: list[list[int]], dialog: Dialog, problems: Sequence[Problem], *,
    max_tokens: int, on_row: TalkListener | None = None,
) -> Completions:
    """Hold conversations, one for each prompt; see :func:`converse`."""
    talks = [Talk(problem) for problem in problems]
    try:
        _hold(speak, prompts, dialog, talks, max_tokens=max_tokens, on_row=on_row)
    except BaseException:  # such as a group that is given to another worker
        dialog.abandon(talks)
        raise
    return Completions(
        [talk.tokens for talk in talks], [talk.log_probs for talk in talks],
        [talk.truncated for talk in talks], [[(v, 1) for v in talk.versions] for talk in talks],
        [talk.sampled for talk in talks])


def _hold(
    speak: Speak, prompts: list[list[int]], dialog: Dialog, talks: list[Talk], *,
    max_tokens: int, on_row: TalkListener | None,
) -> None:
    running = [*range(len(talks))]
    for turn in range(dialog.max_steps):
        speakers = [talks[row] for row in running]
        room = [max_tokens - len(talk.tokens) for talk in speakers]
        said = speak([prompts[row] + talks[row].tokens for row in running], max(room), turn)
        _add(said, speakers, room)
        dialog.answer(speakers)
        for row in running:
            if not talks[row].open and on_row is not None:
                on_row(row, talks[row].turns[-1], talks[row].tokens)
        running = [row for row in running if talks[row].open]
        if not running:
            break


def _add(turn: TensorDictBase, talks: list[Talk], room: list[int]) -> None:
    """A turn's tokens to each conversation, no more than it has room for: the longest of the others
    may have more, and what is cut there is what a shorter limit would have sampled."""
    mask_BT = turn[data.ASSISTANT_MASK]
    sizes = mask_BT.sum(-1).tolist()
    tokens = first_of_rows(turn[data.RESPONSE_TOKENS], sizes)
    cut = (turn[data.FINISH_REASON] == data.FINISH_LENGTH).tolist()
    for row, (talk, size) in enumerate(zip(talks, room, strict=True)):
        log_probs, versions = (turn[key][row][mask_BT[row]].tolist()[:size]
                               for key in (data.LOG_PROBS, data.POLICY_VERSIONS))
        talk.add_turn(tokens[row][:size], log_probs, versions, cut[row] or sizes[row] > size)
