"""``env.step=retry``: a rollout of two turns, beside one that is written out by hand."""

from __future__ import annotations

import pytest

from grpo import data
from grpo.envs.dialog import RETRY, retry
from grpo.envs.tasks.base import Problem

from .by_hand import TEMPLATE, check_gradient, check_masks, rollout

#: Three completions of one prompt: wrong then right, right at once, and wrong twice.
FIRST, SECOND = ["41", "42", "40"], ["42", "4"]
REWARDS = [1.0, 1.0, 0.0]
#: A prompt, how it is shown, and what is said after a wrong answer.
KINDS = {
    "text": ("6*7=", "6*7=", RETRY),
    "chat": (({"role": "user", "content": "6*7="},), "<user>6*7=<eos><assistant>",
             f"<user>{RETRY}<eos><assistant>")}


@pytest.fixture(params=[*KINDS])
def rolled(request, tokenizer, monkeypatch):
    """The batch of these completions, and what they are, turn by turn."""
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    prompt, shown, again = KINDS[request.param]
    problem = Problem(prompt=prompt, answer="42", id="p")
    batch, env = rollout(tokenizer, [problem], {"6*7=": [*FIRST, *SECOND]}, step=retry,
                         reward="exact_match", max_steps=2, repeats=3)
    assert not env.failures
    spoken = [[(shown, False), (f"{one}<eos>", True)] for one in FIRST]
    for row, one in zip((0, 2), SECOND, strict=True):
        spoken[row] += [(again, False), (f"{one}<eos>", True)]
    return batch, spoken


def test_the_last_turn_is_what_a_completion_is_worth(rolled):
    batch, _ = rolled
    assert batch["next", "reward"][:, 0].tolist() == REWARDS
    assert batch["next", "success"][:, 0].tolist() == [True, True, False]


def test_masks_are_those_of_the_rollout_by_hand(rolled, tokenizer):
    batch, spoken = rolled
    check_masks(batch, tokenizer, spoken)
    assert batch[data.LOG_PROBS].ne(0).equal(batch[data.ASSISTANT_MASK])


def test_the_losss_gradient_is_that_of_the_turns_walked_by_hand(rolled, tokenizer, byte_model):
    batch, spoken = rolled
    mean = sum(REWARDS) / len(REWARDS)
    check_gradient(batch, byte_model, tokenizer, spoken, [one - mean for one in REWARDS])
