"""Environments of TorchRL: problems, conversations and rewards are their own."""

from __future__ import annotations

import json
import pickle

import pytest

from grpo import data
from grpo.envs.dialog import Dialog, environment
from grpo.envs.embedded import byte_tokenizer
from grpo.envs.prompts import render_all
from grpo.envs.rewards import RewardScorer, get_reward
from grpo.envs.tasks import make_task
from grpo.envs.verifiable import VerifiableEnv
from grpo.policies.base import Completions, Policy, Sampling
from grpo.policies.converse import respond
from grpo.run.build import build_task

from ..config.configs import composed_like
from . import chat_worlds

OWN = chat_worlds.__name__


def make(world: str, **options):
    return make_task("chat_env", **{"id": f"{OWN}:{world}", "num_test": 2, **options})


def talk_of(problem):
    return problem.partner()


def reply(talk, text, seconds=30.0):
    return talk.reply(text, truncated=False, seconds=seconds)


# -- problems -------------------------------------------------------------------------------------


def test_problems_are_those_of_torchrls_environment_on_local_files(gsm8k_rows):
    from torchrl.envs.llm import GSM8KEnv

    task = make_task("chat_env", id="GSM8KEnv", data_path=str(gsm8k_rows), num_train=5, num_test=3)
    assert [p.prompt[-1]["content"] for p in task.train] == [f"train: {i}+1?" for i in range(5)]
    assert [p.prompt[-1]["content"] for p in task.test] == [f"test: {i}+1?" for i in range(3)]
    assert task.train[0].prompt[0] == {"role": "system", "content": GSM8KEnv.SYSTEM_PROMPT}
    assert task.train[4].answer == "#### 5"
    verifier = get_reward(task.default_reward)
    said = ("<think>4</think><answer>5</answer>", "<answer>6</answer>", "5")
    assert [verifier(text, task.train[4]) for text in said] == [
        (1.0, True), (pytest.approx(0.1), False), (0.0, False)]


def test_real_solutions_are_right_by_its_reward(gsm8k_folder):
    task = make_task("chat_env", id="GSM8KEnv", data_path=str(gsm8k_folder), num_train=20,
                     num_test=0)
    rows = [json.loads(line) for line in (gsm8k_folder / "train.jsonl").open()][:20]
    for problem, row in zip(task.train, rows, strict=True):
        right = row["answer"].rpartition("####")[2].strip()
        assert problem.verifier(f"<think>so</think><answer>{right}</answer>") == 1.0
        assert problem.verifier(f"<answer>{right}1</answer>") == pytest.approx(0.1)


def test_without_held_out_files_the_first_rows_are_held_out(gsm8k_rows, tmp_path):
    (tmp_path / "train.jsonl").write_text((gsm8k_rows / "train.jsonl").read_text())
    task = make_task("chat_env", id="GSM8KEnv", data_path=str(tmp_path), num_test=6)
    asked = [p.prompt[-1]["content"] for p in (*task.test, *task.train)]
    assert asked == [f"train: {i}+1?" for i in range(256)] and len(task.test) == 6


def test_problems_are_the_same_each_time_and_can_be_sent_to_workers():
    first, second = make("guess"), make("guess")
    assert [p.prompt for p in first.train] == [p.prompt for p in second.train]
    assert [p.answer for p in first.train] == list("23456789")
    sent = pickle.loads(pickle.dumps(first.train[0]))
    assert sent.verifier("2") == 1.0 and reply(talk_of(sent), "3")[0]["content"] == "not 3"


def test_environments_without_end_are_asked_for_so_many():
    options = {"id": "CountdownEnv", "args": {"num_count": 2}, "num_test": 2}
    with pytest.raises(ValueError, match="without end; say how many in env.task.num_train"):
        make_task("chat_env", **options)
    task, again = (make_task("chat_env", num_train=4, **options) for _ in range(2))
    assert [p.prompt for p in task.train] == [p.prompt for p in again.train]
    assert len({p.prompt[-1]["content"] for p in task.train + task.test}) == 6


@pytest.mark.parametrize("script", ["grpo.py", "grpo-async.py"])
def test_the_one_line_of_configuration(gsm8k_rows, script):
    config = composed_like(["env=chat_env", f"env.data_path={gsm8k_rows}", "env.num_envs=2",
                            "env.task.num_train=4"], script=script)
    task = build_task(config)
    assert (task.name, len(task.train), len(task.test)) == ("chat_env", 4, 100)
    assert config.env.step == "environment"


# -- conversations --------------------------------------------------------------------------------


def test_a_conversation_goes_on_until_the_environment_is_done():
    talk = talk_of(make("guess").train[0])
    assert reply(talk, "7") == [{"role": "user", "content": "not 7"}]
    assert reply(talk, "8") == [{"role": "user", "content": "not 8"}]
    assert reply(talk, "2") is None
    assert talk.score() == 2.0  # of all turns


def test_an_environment_that_says_nothing_more_ends_the_conversation():
    talk = talk_of(make("guess").train[0])
    assert reply(talk, "silence") is None
    assert talk.score() == 0.5


def test_conversations_do_not_know_of_each_other():
    one, other = (talk_of(problem) for problem in make("guess").train[:2])
    reply(one, "9"), reply(other, "8")
    assert reply(one, "2") is None and reply(other, "2") == [{"role": "user", "content": "not 2"}]
    assert (one.score(), other.score()) == (1.5, 1.0)


class Counting(Policy):
    """Says 1, then 2, and so on, in each conversation."""

    def _generate(self, prompts, on_row=None):
        tokenizer = byte_tokenizer()
        turns = [1 + tokenizer.decode(prompt).count("not ") for prompt in prompts]
        rows = [[*tokenizer(str(turn))["input_ids"], 1] for turn in turns]
        return Completions(rows, [[-0.5] * len(row) for row in rows], [False] * len(rows))


def test_what_is_trained_is_what_was_sampled(tokenizer):
    """Hints stand between the turns as the chat template puts them, and are masked."""
    problems = make("guess").train[:2]  # which mean 2 and 3
    prompts = render_all(problems, tokenizer, max_prompt_tokens=200, what="train")
    score = RewardScorer([(get_reward("verifier"), 1.0)], timeout=30.0)
    dialog = Dialog(environment, tokenizer, score, max_steps=5, max_tokens=200, eos_token_ids=(1,))
    width = max(len(prompt.tokens) for prompt in prompts)
    env = VerifiableEnv(prompts, score, tokenizer, num_prompts=2, group_size=2, dialog=dialog,
                        max_prompt_tokens=width, max_response_tokens=200, eos_token_ids=(1,),
                        shuffle=False)
    policy = Counting(Sampling(max_tokens=200), pad_token_id=0, eos_token_ids=(1,),
                      max_model_len=width + 200, version=lambda: 0)
    batch = env.step(respond(policy, env, env.reset()))
    assert batch["next", "reward"].flatten().tolist() == [1.5, 1.5, 2.0, 2.0]
    for row, guesses in enumerate(("12", "12", "123", "123")):
        tokens = batch[data.TOKENS][row]
        ours = [token for guess in guesses for token in (*tokenizer(guess)["input_ids"], 1)]
        assert tokens[batch[data.ASSISTANT_MASK][row]].tolist() == ours
        assert "not 1" in tokenizer.decode(tokens[batch[data.ATTENTION_MASK][row]])


def test_what_fails_costs_its_row():
    talk = talk_of(make("guess").train[0])
    assert reply(talk, "fail") is None
    with pytest.raises(RuntimeError, match="the environment failed: OSError: the disk is full"):
        talk.score()
    with pytest.raises(RuntimeError, match="gives no reward; choose another env.reward"):
        make("unrewarded", num_test=1).train[0].verifier("hi")
    slow = talk_of(make("guess").train[0])
    slow._step = lambda *args: __import__("time").sleep(30)
    assert reply(slow, "2", seconds=0.05) is None
    with pytest.raises(RuntimeError, match="did not answer within 0.05 s"):
        slow.score()


@pytest.mark.parametrize(("options", "message"), [
    ({"id": None}, "env.id names no environment"),
    ({"id": "NoEnv"}, "has no attribute 'NoEnv'; give a class of torchrl.envs.llm"),
    ({"id": "no_such_module:env"}, "No module named 'no_such_module'"),
    ({"id": "GSM8KEnv", "data_path": "/nowhere"}, "/nowhere' is not a folder"),
    ({"data_path": "."}, "is for classes of torchrl.envs.llm that read a data set"),
    ({"args": {"lowest": 1}}, "env.task.args=.*unexpected keyword argument 'lowest'"),
    ({"args": {"input_mode": "text"}}, "input_mode='history' and one conversation at a time"),
    ({"num_train": 9}, "env.task.num_train=9: .* has only 8 such problems")])
def test_what_cannot_be_used_is_named(options, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        make("guess", **options)
