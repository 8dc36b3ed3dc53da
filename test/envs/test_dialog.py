"""Steps: what they see, what they may say, and the tokens of it."""

from __future__ import annotations

import asyncio
import signal
import time

import pytest

from grpo.envs.dialog import RETRY, Dialog, Talk, environment, named_step, retry
from grpo.envs.rewards import RewardScorer, get_reward
from grpo.envs.tasks.base import Problem

EOS = 1
CHAT = ({"role": "user", "content": "6*7?"},)
#: Leaves the thoughts of earlier turns out, as templates of models that reason do.
THOUGHTLESS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content.split('</think>')[-1] }}<eos>"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}")


def make(tokenizer, step, *, others=(), **changes) -> Dialog:
    functions = (get_reward("exact_match"), *others)
    score = RewardScorer([(fn, 1.0) for fn in functions], workers=1)
    return Dialog(step, tokenizer, score, **{
        "max_steps": 3, "max_tokens": 400, "eos_token_ids": (EOS,), **changes})


def talk(tokenizer, *turns: str, prompt="6*7=") -> Talk:
    """A conversation in which so much was said, and nothing answered yet to the last turn."""
    found = Talk(Problem(prompt, "42", "p1"))
    for turn in turns:
        tokens = [*tokenizer(turn, add_special_tokens=False)["input_ids"], EOS]
        found.add_turn(tokens, [-1.0] * len(tokens), [0] * len(tokens), False)
    return found


@pytest.mark.parametrize("workers", [1, 4])
def test_a_wrong_answer_may_be_given_again(tokenizer, workers):
    talks = [talk(tokenizer, "41"), talk(tokenizer, "42"), talk(tokenizer, "40")]
    make(tokenizer, retry, workers=workers).answer(talks)
    assert [one.replies for one in talks] == [[RETRY], [], [RETRY]]
    assert [one.open for one in talks] == [True, False, True]


def test_a_reward_that_sets_signals_is_asked_in_the_main_thread(tokenizer):
    def graded(completion, problem):  # as graders with a timeout of their own do
        signal.signal(signal.SIGUSR1, signal.signal(signal.SIGUSR1, signal.SIG_IGN))
        return float(completion == problem.answer)

    score = RewardScorer([(graded, 1.0)], workers=4)
    dialog = Dialog(retry, tokenizer, score, max_steps=3, max_tokens=400, eos_token_ids=(EOS,),
                    workers=4)
    for _ in range(2):
        talks = [talk(tokenizer, "41"), talk(tokenizer, "42"), talk(tokenizer, "40")]
        dialog.answer(talks)
        assert [one.replies for one in talks] == [[RETRY], [], [RETRY]]


def test_a_reward_that_waits_for_its_turn_makes_no_step_late(tokenizer):
    async def asked(completion, problem):
        await asyncio.sleep(0.1)
        return float(completion == problem.answer)

    asked.share = lambda **options: ("a server", 1)
    score = RewardScorer([(asked, 1.0)], workers=12, timeout=0.4)
    talks = [talk(tokenizer, "41") for _ in range(12)]  # the last one waits for 1 s
    Dialog(retry, tokenizer, score, max_steps=3, max_tokens=400, eos_token_ids=(EOS,),
           workers=12).answer(talks)
    assert [one.replies for one in talks] == [[RETRY]] * 12


@pytest.mark.parametrize("name", ["repetition_penalty", "soft_overlong_punishment"])
def test_beside_a_reward_of_tokens_an_answer_is_right_or_wrong_as_it_is(tokenizer, name):
    talks = [talk(tokenizer, "41"), talk(tokenizer, "42")]
    make(tokenizer, retry, others=[get_reward(name)]).answer(talks)
    assert [one.replies for one in talks] == [[RETRY], []]


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("why", ["no judge", None])
def test_a_turn_without_a_reward_is_not_called_wrong_and_ends_its_conversation(
        tokenizer, caplog, why, workers):
    def judge(completion, problem):
        if why and completion == "42":
            raise ConnectionError(why)
        return None if completion == "42" else 0.0

    talks = [talk(tokenizer, "42"), talk(tokenizer, "41")]
    make(tokenizer, retry, others=[judge], workers=workers).answer(talks)
    assert [one.replies for one in talks] == [[], [RETRY]]
    assert [one.open for one in talks] == [False, True] and not talks[0].truncated
    assert "1 of 2 conversations end" in caplog.text and (why or "returned None") in caplog.text


def test_a_step_sees_what_was_said(tokenizer):
    seen = []

    def step(state):
        seen.append((state.problem.id, state.completions, state.replies))
        return {"role": "user", "content": "again"}

    dialog, one = make(tokenizer, step), talk(tokenizer, "41")
    dialog.answer([one])
    one.add_turn([65, EOS], [-1.0] * 2, [0] * 2, False)
    dialog.answer([one])
    again = {"role": "user", "content": "again"}
    assert seen == [("p1", ("41",), ()), ("p1", ("41", tokenizer.decode([65])), (again,))]


def test_after_the_last_turn_no_step_is_asked(tokenizer):
    one = talk(tokenizer, "1", "2")
    make(tokenizer, lambda state: pytest.fail("asked"), max_steps=2).answer([one])
    assert not one.open and not one.truncated


class TestTokensOfAMessage:
    def test_behind_a_text_are_its_own(self, tokenizer):
        one = talk(tokenizer, "41")
        make(tokenizer, lambda state: "no").answer([one])
        assert tokenizer.decode(one.tokens[-2:]) == "no"
        assert one.sampled[-3:] == [True, False, False]

    @pytest.mark.parametrize("template", [None, THOUGHTLESS])
    def test_in_a_chat_are_those_of_the_template(self, tokenizer, template, monkeypatch):
        if template:
            monkeypatch.setattr(tokenizer, "chat_template", template)
        one = talk(tokenizer, "<think>six</think>41", prompt=CHAT)
        make(tokenizer, lambda state: "no").answer([one])
        messages = [*CHAT, {"role": "assistant", "content": "<think>six</think>41"},
                    {"role": "user", "content": "no"}]
        shown = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        said = tokenizer.apply_chat_template(list(CHAT), add_generation_prompt=True, tokenize=False)
        joined = tokenizer(said, add_special_tokens=False)["input_ids"] + one.tokens
        if template is None:  # it ends no turn by a token, and the model did
            assert tokenizer.decode(joined) == shown.replace("41", "41<eos>")
        else:  # what was sampled stays, where rendering anew would drop it
            assert tokenizer.decode(joined) == shown.replace("41", "<think>six</think>41")

    def test_of_another_role(self, tokenizer):
        one = talk(tokenizer, "41", prompt=CHAT)
        make(tokenizer, lambda state: {"role": "tool", "content": "7*6 is 42"}).answer([one])
        behind = tokenizer.decode([t for t, sampled in zip(one.tokens, one.sampled, strict=True)
                                   if not sampled])
        assert "tool" in behind and "7*6 is 42" in behind

    @pytest.mark.parametrize("space", ["", " "])
    def test_have_no_second_end_token_before_them(self, tokenizer, monkeypatch, space):
        monkeypatch.setattr(tokenizer, "chat_template", (
            "{% for m in messages %}{% if m.role == 'user' %} [{{ m.content }}]{% else %}"
            "{{ ' ' + m.content + '" + space + "' + eos_token }}{% endif %}{% endfor %}"))
        one = talk(tokenizer, "41", prompt=CHAT)
        make(tokenizer, lambda state: "no").answer([one])
        assert tokenizer.decode(one.tokens) == "41<eos> [no]"

    def test_all_keys_of_a_message_reach_the_template(self, tokenizer, monkeypatch):
        monkeypatch.setattr(tokenizer, "chat_template", "{% for m in messages %}<{{ m.role }} "
                            "{{ m.name }}>{{ m.content }}{% endfor %}")
        one = talk(tokenizer, "41", prompt=CHAT)
        answer = {"role": "tool", "name": "calculator", "content": "42"}
        make(tokenizer, lambda state: answer).answer([one])
        assert tokenizer.decode(one.tokens).endswith("<tool calculator>42")

    def test_of_several_that_stand_together(self, tokenizer):
        one = talk(tokenizer, "41", prompt=CHAT)
        both = [{"role": "tool", "content": "a"}, {"role": "user", "content": "b"}]
        make(tokenizer, lambda state: both).answer([one])
        behind = tokenizer.decode([t for t, sampled in zip(one.tokens, one.sampled, strict=True)
                                   if not sampled])
        assert behind == "\ntool: a\nuser: b\nassistant: "
        text = talk(tokenizer, "41")
        make(tokenizer, lambda state: both).answer([text])
        assert tokenizer.decode(text.tokens).endswith("ab")

    def test_a_template_without_earlier_turns_is_refused(self, tokenizer, monkeypatch):
        monkeypatch.setattr(tokenizer, "chat_template", "{{ messages[-1].content }}")
        with pytest.raises(ValueError, match=r"leaves out a turn.*set env.step to null"):
            make(tokenizer, lambda state: "no").answer([talk(tokenizer, "41", prompt=CHAT)])


@pytest.mark.parametrize("answer", [
    42, {"content": "no role"}, ["no"], [], {"role": "tool", "content": 42},
    {"role": "tool", "content": [{"type": "text", "text": "42"}]},
    {"role": "tool", "content": "42", "seen": {1}}])
def test_what_is_no_message_is_an_error(tokenizer, answer):
    with pytest.raises(TypeError, match="env.step returned .* for problem 'p1'; return the next"):
        make(tokenizer, lambda state: answer).answer([talk(tokenizer, "41")])


@pytest.mark.parametrize("answer", ["", {"role": "user", "content": ""}])
def test_a_message_without_tokens_is_an_error_as_two_turns_would_look_like_one(tokenizer, answer):
    with pytest.raises(TypeError, match="env.step returned .* for problem 'p1'.*no token"):
        make(tokenizer, lambda state: answer).answer([talk(tokenizer, "41")])
    chat = talk(tokenizer, "41", prompt=CHAT)  # where the template says who speaks
    make(tokenizer, lambda state: answer).answer([chat])
    assert chat.open and not all(chat.sampled)


def test_an_error_of_a_step_names_the_problem(tokenizer):
    with pytest.raises(ZeroDivisionError) as caught:
        make(tokenizer, lambda state: 1 / 0).answer([talk(tokenizer, "41")])
    assert caught.value.__notes__ == ["while env.step answered turn 1 of problem 'p1'"]


@pytest.mark.parametrize("workers", [1, 2])  # in this thread, by an alarm, and in others
def test_a_step_that_does_not_return_is_an_error_at_its_deadline(tokenizer, workers):
    dialog = make(tokenizer, lambda state: time.sleep(30), workers=workers)
    dialog.score.timeout = 0.1
    with pytest.raises(TimeoutError, match="env.step took longer than 0.2 s on turn 1 of problem "
                                           "'p1', twice env.reward_timeout"):
        dialog.answer([talk(tokenizer, "41")])


def test_a_problem_without_anybody_who_answers_is_named(tokenizer):
    with pytest.raises(ValueError, match="problem 'p1' has nobody who answers the model"):
        make(tokenizer, environment).answer([talk(tokenizer, "41")])


def test_steps_have_names_or_import_paths():
    assert named_step("retry") is retry and named_step("environment") is environment
    assert named_step("grpo.envs.dialog:retry") is retry
    with pytest.raises(ValueError, match="no step 'again'; give retry, environment, or a function"):
        named_step("again")
    with pytest.raises(ValueError, match="step 'math:nothing': module 'math' has no function"):
        named_step("math:nothing")
