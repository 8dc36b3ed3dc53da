"""Conversations: the trained tokens are those that were sampled, where they were sampled."""

from __future__ import annotations

import pytest
import torch

from grpo import data
from grpo.collectors.sync import SyncCollector
from grpo.envs.dialog import Dialog
from grpo.envs.dialog import environment as of_the_problem
from grpo.envs.prompts import Prompt
from grpo.envs.rewards import RewardResult, RewardScorer
from grpo.envs.tasks.base import Problem
from grpo.envs.verifiable import VerifiableEnv
from grpo.objectives.head import log_probs_from_logits
from grpo.policies.base import Completions, Policy, Sampling
from grpo.policies.converse import converse
from grpo.policies.transformers import TransformersPolicy

PAD, EOS = 0, 1
WIDTH, TOTAL, STEPS = 40, 60, 3
# Many tokens end a turn, so that a random model's are some six tokens long.
ENDS = (EOS, *range(40, 80))


def a_byte_more(state) -> str | None:
    """Answer some turns, by what was said."""
    return None if len(state.completions[-1]) % 5 == 4 else f"<{len(state.completions)}>"


def score_of(completion: str, problem: Problem) -> RewardResult:
    return RewardResult(len(completion) / 10, len(completion) > 3)


def dialog(tokenizer, step=a_byte_more, *, eos=(EOS,), **changes) -> Dialog:
    options = {"max_steps": STEPS, "max_tokens": TOTAL, "eos_token_ids": eos, **changes}
    return Dialog(step, tokenizer, RewardScorer([(score_of, 1.0)], workers=1), **options)


def problems(tokenizer, chat: bool) -> list[Prompt]:
    found = []
    for number in range(4):
        text = f"{number}+{number}="
        prompt = ({"role": "user", "content": text},) if chat else text
        tokens = (tokenizer.apply_chat_template(list(prompt), add_generation_prompt=True,
                                                tokenize=False) if chat else text)
        found.append(Prompt(Problem(prompt, "0", str(number)),
                            tokenizer(tokens, add_special_tokens=False)["input_ids"]))
    return found


@pytest.fixture
def policy(byte_model):
    return TransformersPolicy(
        byte_model, Sampling(max_tokens=TOTAL, seed=3), pad_token_id=PAD, eos_token_ids=ENDS,
        max_model_len=WIDTH + TOTAL, version=lambda: 5)


def environment(tokenizer, chat: bool, **changes) -> VerifiableEnv:
    talk = dialog(tokenizer, eos=ENDS, **changes)
    return VerifiableEnv(
        problems(tokenizer, chat), talk.score, tokenizer, num_prompts=4, group_size=8,
        max_prompt_tokens=WIDTH, max_response_tokens=TOTAL, eos_token_ids=ENDS, dialog=talk)


def turns_of(batch, row: int) -> list[tuple[bool, list[int]]]:
    """The parts of a row behind its prompt: whether it was sampled, and its tokens."""
    start = int(batch[data.PROMPT_MASK][row].sum())
    end = int(batch[data.ATTENTION_MASK][row].sum())
    parts: list[tuple[bool, list[int]]] = []
    for token, sampled in zip(batch[data.TOKENS][row, start:end].tolist(),
                              batch[data.ASSISTANT_MASK][row, start:end].tolist(), strict=True):
        if not parts or parts[-1][0] != sampled:
            parts.append((sampled, []))
        parts[-1][1].append(token)
    return parts


@pytest.mark.parametrize("chat", [False, True])
def test_log_probs_are_the_models_on_the_joined_tokens(byte_model, policy, tokenizer, chat):
    batch = SyncCollector(environment(tokenizer, chat), policy).collect()
    mask_BT = batch[data.ASSISTANT_MASK]
    with torch.no_grad():
        logits = byte_model(input_ids=batch[data.TOKENS],
                            attention_mask=batch[data.ATTENTION_MASK].long()).logits
    sampled = mask_BT[:, 1:]
    expected, _ = log_probs_from_logits(logits[:, :-1][sampled], batch[data.TOKENS][:, 1:][sampled])
    torch.testing.assert_close(batch[data.LOG_PROBS][:, 1:][sampled], expected, atol=1e-4, rtol=0)
    assert not batch[data.LOG_PROBS][~mask_BT].any()
    assert (batch[data.POLICY_VERSIONS][mask_BT] == 5).all()
    assert (batch[data.POLICY_VERSIONS][~mask_BT] == data.NO_VERSION).all()


@pytest.mark.parametrize("chat", [False, True])
def test_the_turns_are_those_of_the_dialog(policy, tokenizer, chat):
    batch = SyncCollector(environment(tokenizer, chat), policy).collect()
    counts = set()
    for row in range(len(batch)):
        parts = turns_of(batch, row)
        assert parts[0][0] and parts[-1][0]  # the model begins and ends
        counts.add(len(parts[::2]))
        for number, (turn, reply) in enumerate(zip(parts[::2], parts[1::2], strict=False), 1):
            assert turn[1][-1] in ENDS and not set(turn[1][:-1]) & set(ENDS)
            shown = tokenizer.decode(reply[1])
            assert shown == f"<{number}>" if not chat else f"<{number}>" in shown
        last = tokenizer.decode([t for t in parts[-1][1] if t not in ENDS],
                                skip_special_tokens=True)
        assert float(batch[data.REWARD][row]) == pytest.approx(len(last) / 10)
    assert counts == {1, 2, 3}


def test_a_row_of_which_the_step_cannot_know_whether_it_is_right_is_marked(policy, tokenizer):
    def away(completion: str, problem: Problem) -> float:
        raise ConnectionError("no judge")

    env = environment(tokenizer, False, step=lambda state: None if state.success else "again")
    env.score = env.dialog.score = RewardScorer([(away, 1.0)], workers=1)
    batch = SyncCollector(env, policy).collect()
    assert batch[data.REWARD_ERROR].all() and "no judge" in str(env.failures)
    assert [len(turns_of(batch, row)) for row in range(len(batch))] == [1] * len(batch)


def test_the_same_conversations_are_held_again(policy, tokenizer):
    first, second = (SyncCollector(environment(tokenizer, False), policy.with_sampling()).collect()
                     for _ in range(2))
    assert first[data.TOKENS].equal(second[data.TOKENS])


class Script(Policy):
    """Says what it is told to, turn by turn."""

    def __init__(self, turns: list[list[list[int]]], **options) -> None:
        super().__init__(Sampling(max_tokens=12), pad_token_id=PAD, eos_token_ids=(EOS,),
                         max_model_len=40, **options)
        self.turns, self.asked = turns, []

    def _generate(self, prompts, on_row=None):
        limit = self.sampling.max_tokens
        self.asked.append((prompts, limit))
        rows = [row[:limit] for row in self.turns[len(self.asked) - 1]]
        return Completions(rows, [[-0.5] * len(row) for row in rows],
                           [EOS not in row for row in rows])


def held(tokenizer, script: Script, step, **options):
    task = [Problem("?", "", str(row)) for row in range(len(script.turns[0]))]
    told = []
    batch = converse(script, script.pad_prompts([[65]] * len(task)),
                     dialog(tokenizer, step, max_tokens=12, **options), task,
                     on_row=lambda row, tokens, talk: told.append((row, tokens)))
    return batch, told


def test_a_turn_stands_behind_all_that_was_said(tokenizer):
    script = Script([[[66, EOS], [67, 68, EOS]], [[69, EOS]]])
    once = tokenizer.decode([66])
    batch, told = held(tokenizer, script, lambda state: {once: "x"}.get(state.completions[-1]))
    (x,) = tokenizer("x", add_special_tokens=False)["input_ids"]
    assert script.asked == [([[65], [65]], 12), ([[65, 66, EOS, x]], 12 - 3)]
    assert told == [(1, [67, 68, EOS]), (0, [69, EOS])]
    assert batch[data.RESPONSE_TOKENS][:, :5].tolist() == [[66, EOS, x, 69, EOS],
                                                          [67, 68, EOS, PAD, PAD]]
    assert batch[data.ASSISTANT_MASK][:, :6].int().tolist() == [[0, 1, 1, 0, 1, 1],
                                                               [0, 1, 1, 1, 0, 0]]
    assert script.calls == 2


def test_a_turn_that_was_cut_is_the_last(tokenizer):
    batch, _ = held(tokenizer, Script([[[66] * 12, [66, EOS]], [[70, EOS]]]), lambda state: "x",
                    max_steps=2)
    assert batch[data.FINISH_REASON].tolist() == [data.FINISH_LENGTH, data.FINISH_STOP]
    assert batch[data.ASSISTANT_MASK].sum(-1).tolist() == [12, 4]


def test_a_row_with_less_room_than_others_is_cut_there(tokenizer):
    script = Script([[[66] * 8 + [EOS], [66, EOS]], [[70] * 8 + [EOS], [71] * 8 + [EOS]]])
    batch, _ = held(tokenizer, script, lambda state: "x", max_steps=2)
    assert script.asked[1][1] == 9  # the room of the second
    assert batch[data.FINISH_REASON].tolist() == [data.FINISH_LENGTH, data.FINISH_STOP]
    assert batch[data.RESPONSE_TOKENS][0].tolist()[-2:] == [70, 70]
    assert batch[data.ATTENTION_MASK].sum(-1).tolist() == [1 + 12, 1 + 12]


def test_a_message_that_leaves_no_room_ends_the_conversation_as_cut(tokenizer):
    batch, _ = held(tokenizer, Script([[[66, EOS]]]), lambda state: "x" * 10)
    assert batch[data.FINISH_REASON].tolist() == [data.FINISH_LENGTH]
    assert batch[data.ATTENTION_MASK].sum(-1).tolist() == [1 + 2]


class Partner:
    """Answers the first turn of row 0 and nothing else."""

    def __init__(self, answers: bool) -> None:
        self.answers, self.stopped = answers, 0

    def reply(self, text, *, truncated, seconds):
        return [{"role": "user", "content": "x"}] if self.answers else None

    def stop(self, *, seconds):
        self.stopped += 1

    def score(self):
        return 1.0


def test_conversations_that_break_off_are_ended_and_nothing_of_them_is_kept(tokenizer):
    partners = [Partner(answers=True), Partner(answers=False)]
    task = [Problem("?", "", str(row), partner=lambda row=row: partners[row]) for row in range(2)]
    script = Script([[[66, EOS], [67, EOS]]])  # has no second turn
    talk = dialog(tokenizer, of_the_problem, max_tokens=12)
    with pytest.raises(IndexError):
        converse(script, script.pad_prompts([[65]] * 2), talk, task)
    assert [partner.stopped for partner in partners] == [1, 1] and not talk._concluded


def test_a_problem_may_end_a_conversation_of_one_turn(tokenizer):
    partner = Partner(answers=True)
    task = [Problem("?", "", "0", partner=lambda: partner)]
    script = Script([[[66, EOS]]])
    talk = dialog(tokenizer, of_the_problem, max_steps=1, max_tokens=12)
    said = converse(script, script.pad_prompts([[65]]), talk, task)
    assert said[data.RESPONSE_TOKENS][said[data.ASSISTANT_MASK][:, 1:]].tolist() == [66, EOS]
    assert partner.stopped == 1 and talk.concluded(task[0], [66, EOS]).verifier("B") == 1.0
