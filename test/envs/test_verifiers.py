"""Environments of verifiers, on the package itself: problems, conversations, rubrics."""

from __future__ import annotations

import asyncio
import pickle
import re
import signal
import sys
import time
from functools import partial

import pytest

from grpo import data
from grpo.envs.dialog import environment
from grpo.envs.prompts import render
from grpo.envs.rewards import get_reward
from grpo.envs.tasks import make_task
from grpo.run.build import build_task
from grpo.run.identity import identity_changes

from ..config.configs import composed_like
from . import by_hand
from .worlds import guess, lookup, sums

vf = pytest.importorskip("verifiers", reason="needs the extra verifiers")
if not hasattr(vf, "load_environment"):
    pytest.skip("needs verifiers below 0.2", allow_module_level=True)

CALL = '<tool_call>{"name": "population", "arguments": {"city": "%s"}}</tool_call>'


@pytest.fixture
def chat(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", by_hand.TEMPLATE)
    return tokenizer


def make(world, **options):
    return make_task("verifiers", id=world.__name__, **options)


rollout = partial(by_hand.rollout, step=environment, reward="verifier")


def own_reward(world, row: dict, completion: list, **state) -> float:
    """What the package's own rubric gives a conversation that is written out here."""
    env = vf.load_environment(world.__name__)

    async def score() -> float:
        found = await env.init_state(row, client(), "m", {})
        found.update(completion=completion, **state)
        await env.rubric.score_rollout(found)
        return found["reward"]

    return asyncio.run(score())


def client():
    class Nobody(vf.Client):
        def setup_client(self, config): ...
        async def close(self): ...
        to_native_tool = to_native_prompt = get_native_response = setup_client
        raise_from_native_response = from_native_response = setup_client

    return Nobody(None)


def said(text: str, *calls):
    from verifiers.types import AssistantMessage, ToolCall

    return AssistantMessage(content=text, tool_calls=[
        ToolCall(id=str(i), name=name, arguments=arguments)
        for i, (name, arguments) in enumerate(calls)] or None)


# -- problems -------------------------------------------------------------------------------------


def test_problems_are_those_of_the_environment():
    task = make(guess)
    assert [problem.answer for problem in task.train] == list("3579")
    assert [problem.answer for problem in task.test] == list("46")
    assert task.train[0].prompt == ({"role": "user", "content": "0?"},)
    assert len(pickle.dumps(task.train)) < 10_000


def test_where_there_is_one_data_set_its_first_problems_are_held_out():
    task = make(sums, args={"highest": 4}, num_train=10)
    asked = [problem.prompt[-1]["content"] for problem in task.test + task.train]
    assert asked == [f"{a}+{b}=" for a in range(5) for b in range(5)][:12]
    assert len(task.test) == 2


def test_tools_are_shown_in_the_prompt(chat):
    shown = chat.decode(render(make(lookup).train[0], chat))
    assert shown == "[population(city)]<user>A?<eos><assistant>"


def test_the_runs_own_signal_handlers_stay():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    make(sums, args={"highest": 5})
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


# -- rewards --------------------------------------------------------------------------------------


def test_rewards_of_one_turn_are_the_rubrics_own_row_by_row(chat):
    task = make(sums, num_train=3, num_test=0)
    lines = {"0+0=": ["0", "17"], "0+1=": [" 1", ""], "0+2=": ["no", "2"]}
    batch, env = rollout(chat, task.train, lines)
    rows = {row["prompt"][0]["content"]: row for row in
            vf.load_environment(sums.__name__).get_dataset()}
    for i, problem in enumerate(env.current_problems):
        question = problem.prompt[0]["content"]
        expected = own_reward(sums, rows[question], [said(lines[question][i % 2])])
        assert float(batch["next", "reward"][i]) == pytest.approx(expected), (question, i)
    assert not batch["next", "reward_error"].any() and batch["next", "success"].sum() == 0


def test_rewards_of_several_turns_are_the_rubrics_own(chat):
    """Groups of one prompt, whose conversations end in the same words after different turns."""
    task = make(guess)
    problem = next(one for one in task.train if one.answer == "5")
    batch, _ = rollout(chat, [problem], {"1?": ["5", "3", "5"]})
    assert batch["next", "reward"][:, 0].tolist() == pytest.approx([1 - 0.1, 1 / 2 - 0.2])
    again, _ = rollout(chat, [problem], {"1?": ["3", "5", "5"]})  # the rows the other way round
    assert again["next", "reward"][:, 0].tolist() == pytest.approx([1 / 2 - 0.2, 1 - 0.1])
    row = dict(next(row for row in vf.load_environment(guess.__name__).get_dataset()
                    if row["answer"] == "5"))
    assert own_reward(guess, row, [], guesses=["3", "5"], trajectory=[{}, {}]) == pytest.approx(
        float(batch["next", "reward"][1]))


def test_rewards_of_held_out_problems_are_those_of_their_conversations(chat):
    batch, _ = rollout(chat, make(guess).test, {"0?": ["4"], "1?": ["9", "6"]}, repeats=1)
    assert batch["next", "reward"][:, 0].tolist() == pytest.approx([0.9, 0.3])


def test_a_conversation_ends_where_the_environment_or_the_run_ends_it(chat):
    problem = make(guess).train[0]
    of_env, _ = rollout(chat, [problem], {"0?": ["9"] * 6})
    of_run, _ = rollout(chat, [problem], {"0?": ["9"] * 6}, max_steps=2)
    counts = [(batch[data.TOKENS] == chat.convert_tokens_to_ids("9")).sum(-1).tolist()
              for batch in (of_env, of_run)]
    assert counts == [[3, 3], [2, 2]]
    rewards = [batch["next", "reward"][0].item() for batch in (of_env, of_run)]
    assert rewards == pytest.approx([-0.3, -0.2])


def test_a_conversation_ends_where_the_environment_says_nothing(chat):
    problem = make(guess, args={"silent": True}).train[0]
    batch, env = rollout(chat, [problem], {"0?": ["9"] * 6})
    assert batch[data.ASSISTANT_MASK].sum(-1).tolist() == [2, 2]  # one turn and its end
    assert not batch["next", "reward_error"].any(), env.failures
    assert batch["next", "reward"][:, 0].tolist() == pytest.approx([-0.1, -0.1])


def test_without_a_step_a_conversation_is_its_first_turn():
    problem = make(guess).train[0]
    assert get_reward("verifier")("3", problem).reward == pytest.approx(0.9)
    assert get_reward("verifier")("8", problem).reward == pytest.approx(-0.1)


# -- tools: a rollout written out by hand ----------------------------------------------------------


SHOWN = "[population(city)]<user>A?<eos><assistant>"
CALLS = [f"Hm.{CALL % city}" for city in "AZ"]
#: Two conversations.
SPOKEN = [
    [(SHOWN, False), (f"{CALLS[0]}<eos>", True), ("<tool>12<eos><assistant>", False),
     ("12<eos>", True)],
    [(SHOWN, False), (f"{CALLS[1]}<eos>", True), ("<tool>'Z'<eos><assistant>", False),
     ("?<eos>", True)]]


@pytest.fixture
def with_tool(chat):
    """The batch of these conversations, and its environment."""
    return rollout(chat, make(lookup).train[:1], {"A?": [*CALLS, "12", "?"]})[0]


def test_masks_with_a_tool_are_those_of_the_rollout_by_hand(chat, with_tool):
    by_hand.check_masks(with_tool, chat, SPOKEN)
    # A call of a tool that fails is answered with its error, and counts as a call.
    row = dict(vf.load_environment(lookup.__name__).get_dataset()[0])
    assert with_tool["next", "reward"][:, 0].tolist() == pytest.approx([
        own_reward(lookup, row, [said("Hm.", ("population", "{}")), said(end)])
        for end in ("12", "?")]) == [1.25, 0.25]


def test_the_losss_gradient_with_a_tool_is_that_of_the_turns_walked_by_hand(
        chat, with_tool, byte_model):
    by_hand.check_gradient(with_tool, byte_model, chat, SPOKEN, [1.25 - 0.75, 0.25 - 0.75])


# -- failures -------------------------------------------------------------------------------------


def test_a_reward_function_that_fails_costs_its_row_and_is_no_zero(chat):
    task = make(sums, args={"broken": True}, num_train=1, num_test=0)
    batch, env = rollout(chat, task.train, {"0+0=": ["0", "7"]})
    assert batch["next", "reward_error"][:, 0].tolist() == [False, True]
    assert "fails: LookupError: no seven" in str(env.failures)


def test_an_environment_that_fails_costs_the_row(chat):
    batch, env = rollout(chat, make(guess, args={"breaks": True}).train[:1], {"0?": ["1", "2"]})
    assert batch["next", "reward_error"].all() and "out of order" in str(env.failures)


def test_an_environment_that_says_what_the_model_cannot_hear_costs_the_row(chat):
    batch, env = rollout(chat, make(guess, args={"greets": True}).train[:1], {"0?": ["1", "2"]})
    assert batch["next", "reward_error"].all()
    assert "says more before the first turn than the prompt in its data set" in str(env.failures)


def test_an_environment_that_does_not_answer_costs_the_row(chat):
    start = time.monotonic()
    batch, env = rollout(chat, make(guess, args={"slow": True}).train[:1], {"0?": ["1", "2"]},
                         timeout=1.0)
    assert batch["next", "reward_error"].all() and time.monotonic() - start < 20
    assert "did not answer within 1 s" in str(env.failures)


def test_a_function_that_does_not_await_is_said_to_hold_up_all_conversations(chat):
    batch, env = rollout(chat, make(guess, args={"blocks": 2.0}).train[:1], {"0?": ["1", "2"]},
                         timeout=0.5)
    assert batch["next", "reward_error"].all()
    assert re.search("within 0.5 s; one of its functions.* holds up all", str(env.failures))


@pytest.mark.parametrize(("options", "message"), [
    ({"id": None}, "env.id names no environment.*env.id=my_env"),
    ({"id": "no_such_env"}, "env.id=no_such_env, .*Could not import 'no_such_env'"),
    ({"id": sums.__name__, "args": {"colour": 1}}, "colour.*TypeError"),
    ({"id": sums.__name__, "args": {"grouped": True}}, "compares the completions of a group"),
    ({"id": guess.__name__, "num_train": 5}, "env.task.num_train=5: env.id=.* has only 4 such"),
    ({"id": guess.__name__, "num_test": 3}, "env.task.num_test=3: env.id=.* has only 2 such"),
    ({"id": guess.__name__, "num_test": -1}, "env.task.num_test=-1 must be an integer"),
])
def test_what_cannot_be_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make_task("verifiers", **options)


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(ImportError, match="pip install 'verifiers>=0.1.14,<0.2', or the extra"):
        make(sums, args={"highest": 3})
    monkeypatch.setitem(sys.modules, "verifiers", signal)  # a module without load_environment
    with pytest.raises(ImportError, match="the extra verifiers; installed is another"):
        make(sums, args={"highest": 3})


# -- configuration --------------------------------------------------------------------------------


@pytest.mark.parametrize("script", ["grpo.py", "grpo-async.py"])
def test_everything_can_be_set_on_the_command_line(script):
    config = composed_like(["env=verifiers", f"env.id={sums.__name__}", "env.num_envs=2",
                            "env.task.args={highest: 3}", "env.task.num_test=4"], script=script)
    task = build_task(config)
    assert (len(task.train), len(task.test), config.env.step) == (12, 4, "environment")


def test_another_environment_is_another_run():
    assert identity_changes({"env": {"id": "a"}}, {"env": {"id": "b"}})
