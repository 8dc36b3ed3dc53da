"""Runs that end early, by a signal or because something failed: what was trained is kept."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import weakref
from contextlib import ExitStack, suppress

import numpy as np
import pytest
import torch

from grpo.policies.handle import EngineError
from grpo.report.history import History
from grpo.report.loggers import read_jsonl
from grpo.training.checkpoint import find_checkpoint, list_checkpoints
from grpo.training.stopping import Stopped, StopRequests, signals_end_the_process
from grpo.weights.canary import StaleWeightsError

from ..support import REPO
from .runs import make_trainer, timeless, weights


def seed(value: int) -> None:
    for seed_one in (random.seed, np.random.seed, torch.manual_seed):
        seed_one(value)


def ends_in(trainer, owner, name: str, action, *, call: int):
    """Let something happen when a method of the run has worked for the ``call``-th time."""
    function, calls = getattr(owner, name), []

    def wrapped(*args, **kwargs):
        result = function(*args, **kwargs)
        calls.append(None)
        if len(calls) == call:
            action()
        return result

    setattr(owner, name, wrapped)


#: Updates that the self-test publishes before the first step.
SELF_TEST = 2
PLACES = {"generation": lambda t: (t.collector.env, "step", 4),
          "reward": lambda t: (t.collector.env, "reset", 4),
          "update": lambda t: (t.learner.optimizer, "step", 4),
          "publish": lambda t: (t.weights, "publish", 4 + SELF_TEST),
          "evaluation": lambda t: (t.evaluator, "run", 3)}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("place", PLACES)
def test_a_signal_anywhere_leaves_a_checkpoint_from_which_the_metrics_go_on_exactly(
        make_config, tmp_path, reports, capsys, place, number):
    config = make_config(iterations=5, reward="by_text_and_chance",
                         train={"checkpoint_frequency": 0})
    seed(1)
    make_trainer(config, tmp_path / "whole").fit()
    seed(1)
    stopped = make_trainer(config, tmp_path / "stopped")
    owner, name, call = PLACES[place](stopped)
    ends_in(stopped, owner, name, lambda: os.kill(os.getpid(), number), call=call)
    with pytest.raises(Stopped) as raised:
        stopped.fit()
    assert raised.value.exit_code == {signal.SIGTERM: 143, signal.SIGINT: 130}[number]
    assert reports[-1] == tmp_path / "stopped"
    shown = " ".join(capsys.readouterr().out.split())
    assert "the run can go on: resume=auto" in shown
    assert "✗ stopped by" in shown and "✓" not in shown.rpartition("✗")[2]
    seed(99)
    checkpoint = find_checkpoint("auto", root=tmp_path / "stopped", exp_name="grpo")
    # What is generated is dropped, also to evaluate; a step that has begun is finished.
    assert checkpoint.step == (3 if place in ("generation", "reward") else 4)
    make_trainer(config, checkpoint.run_dir, checkpoint).fit()
    ours, whole = (timeless(History.read(tmp_path / name).rows) for name in ("stopped", "whole"))
    assert ours == whole


def test_a_signal_before_the_first_update_ends_the_run_without_a_checkpoint(make_config, tmp_path):
    trainer = make_trainer(make_config(), tmp_path)
    ends_in(trainer, trainer.canary, "check", lambda: os.kill(os.getpid(), signal.SIGTERM), call=1)
    with pytest.raises(Stopped):
        trainer.fit()
    assert not list_checkpoints(tmp_path)


def test_a_run_that_is_stopped_in_its_first_rollout_does_not_look_twice(make_config, tmp_path):
    trainer = make_trainer(make_config(), tmp_path)
    ends_in(trainer, trainer.collector.env, "reset",
            lambda: os.kill(os.getpid(), signal.SIGTERM), call=1)
    with pytest.raises(Stopped):
        trainer.fit()
    checkpoint = find_checkpoint(str(tmp_path), root=tmp_path, exp_name="grpo")
    assert checkpoint.step == 0
    make_trainer(make_config(), tmp_path, checkpoint).fit()
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [0, 1, 2, 3, 4, 5]


def test_handlers_are_put_back(make_config, tmp_path):
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    make_trainer(make_config(iterations=1), tmp_path).fit()
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_while_a_run_is_set_up_ends_it_with_its_code_when_all_is_cleaned_up(
        number, code, capsys):
    ended = []
    with pytest.raises(SystemExit) as raised, signals_end_the_process():
        try:
            os.kill(os.getpid(), number)
            time.sleep(5)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)  # interrupts no cleaning up
            ended.append(True)
    assert raised.value.code == code and ended
    assert f"stopped by {number.name}" in capsys.readouterr().err


def test_a_second_ctrl_c_ends_a_step_at_once_and_a_second_sigterm_does_not():
    with StopRequests() as requests:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
        assert requests.asked == signal.SIGTERM
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(Stopped):
            os.kill(os.getpid(), signal.SIGINT)


class Deleted:
    """Is interrupted where Python drops what is raised."""

    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)


def interrupted_in_a_weak_reference():
    kept = set()
    held = weakref.ref(kept, lambda _: os.kill(os.getpid(), signal.SIGINT))
    del kept
    assert held() is None


@pytest.mark.parametrize("drop", [Deleted, interrupted_in_a_weak_reference])
def test_a_signal_in_what_python_runs_by_itself_is_not_lost(drop, capsys):
    """The collector of garbage runs for a second where an engine has loaded its weights."""
    hook = sys.unraisablehook
    with pytest.raises(SystemExit) as raised, signals_end_the_process():
        drop()
        time.sleep(20)
        pytest.fail("the signal was lost")
    assert raised.value.code == 130 and capsys.readouterr().err.startswith("stopped by SIGINT")
    assert sys.unraisablehook is hook


def test_a_signal_that_a_library_has_caught_ends_the_run_before_its_first_step(
        make_config, tmp_path):
    trainer, reached = make_trainer(make_config(), tmp_path), []
    with pytest.raises(SystemExit) as raised, signals_end_the_process():
        with suppress(BaseException):
            os.kill(os.getpid(), signal.SIGINT)
        reached.append(True)
        trainer.fit()
    assert raised.value.code == 130 and reached
    assert not read_jsonl(tmp_path / "metrics.jsonl")


def test_a_signal_that_a_library_has_caught_ends_what_may_be_dropped():
    with StopRequests() as requests, pytest.raises(Stopped):
        with requests.at_once(), suppress(BaseException):
            os.kill(os.getpid(), signal.SIGTERM)
        pytest.fail("what was dropped has been used")


def test_a_second_sigterm_cuts_short_no_cleaning_up_around_a_run(make_config, tmp_path):
    """As Slurm may send it."""
    trainer, ended = make_trainer(make_config(), tmp_path), []
    ends_in(trainer, trainer.canary, "check", lambda: os.kill(os.getpid(), signal.SIGTERM), call=2)

    def clean_up():
        os.kill(os.getpid(), signal.SIGTERM)
        ended.append(True)

    with pytest.raises(SystemExit) as raised, signals_end_the_process(), ExitStack() as at_end:
        at_end.callback(clean_up)
        trainer.fit()
    assert raised.value.code == 143 and ended


def test_a_signal_in_the_last_step_is_none_for_a_run_that_is_over(make_config, tmp_path):
    trainer, after = make_trainer(make_config(iterations=2), tmp_path), []
    trainer.evaluator = None  # an evaluation would be still to be done
    ends_in(trainer, trainer.canary, "check", lambda: os.kill(os.getpid(), signal.SIGTERM), call=3)
    with signals_end_the_process():
        trainer.fit()
        after.append(trainer.step)
    assert after == [2]


#: Its reader is gone, as after Ctrl-C in ``grpo train 2>&1 | tee log``.
UNREAD = """
import os, signal, sys
from grpo.training import stopping
reader, writer = os.pipe()
os.close(reader)
os.dup2(writer, 2)
"""


@pytest.mark.parametrize("program, expected", [
    ("""
with stopping.StopRequests() as requests:
    os.kill(os.getpid(), signal.SIGINT)
    print("the step goes on")
    requests.asked == signal.SIGINT and sys.exit(7)
""", (7, "the step goes on\n")),
    ("""
stopping.signals_end_at_once(lambda: print("ended", flush=True))
os.kill(os.getpid(), signal.SIGTERM)
""", (143, "ended\n"))])
def test_signals_are_heeded_where_nobody_reads_what_is_said_of_them(program, expected):
    done = subprocess.run([sys.executable, "-c", UNREAD + program], capture_output=True, text=True,
                          timeout=60, env=os.environ | {"PYTHONPATH": str(REPO)})
    assert (done.returncode, done.stdout) == expected


# -- Failures -------------------------------------------------------------------------------------


def test_gradients_that_are_not_numbers_leave_a_checkpoint_and_no_trace_in_the_next_ones(
        make_config, tmp_path):
    trainer = make_trainer(make_config(train={"checkpoint_frequency": 0}), tmp_path)
    optimizer = trainer.learner.optimizer
    norm, norms = optimizer._total_norm, []

    def infinite_third(grads):
        norms.append(norm(grads))
        return norms[-1] * float("inf") if len(norms) == 3 else norms[-1]

    optimizer._total_norm = infinite_third
    with pytest.raises(FloatingPointError):
        trainer.fit()
    assert all(master.grad is None for master in optimizer.masters)
    assert [found.step for found in list_checkpoints(tmp_path)] == [2]
    checkpoint = list_checkpoints(tmp_path)[-1]
    resumed = make_trainer(make_config(), tmp_path, checkpoint)
    assert torch.equal(weights(resumed), weights(trainer))
    resumed.iterate()


@pytest.mark.parametrize(("place", "error", "kept"), [
    (lambda t: (t.collector.env, "step", 3), EngineError("the engine is gone"), 2),
    (lambda t: (t.weights, "publish", 3 + SELF_TEST), EngineError("the engine is gone"), 3),
    (lambda t: (t.canary, "check", 3), StaleWeightsError("the weights are old"), 2)])
def test_a_dead_engine_and_a_failed_proof_leave_a_checkpoint(
        make_config, tmp_path, place, error, kept):
    trainer = make_trainer(make_config(train={"checkpoint_frequency": 0}), tmp_path)

    def fail():
        raise error

    owner, name, call = place(trainer)
    ends_in(trainer, owner, name, fail, call=call)
    with pytest.raises(type(error)):
        trainer.fit()
    checkpoint = find_checkpoint("auto", root=tmp_path, exp_name="grpo")
    assert checkpoint.step == kept == read_jsonl(tmp_path / "metrics.jsonl")[-1]["step"]
    resumed = make_trainer(make_config(), tmp_path, checkpoint)
    assert torch.equal(weights(resumed), weights(trainer))


def test_after_a_failed_proof_the_checkpoint_that_was_compared_stays_and_is_named(
        make_config, tmp_path, capsys):
    train = {"checkpoint_frequency": 2, "eval_frequency": 0, "keep_checkpoints": 1}
    trainer = make_trainer(make_config(train=train), tmp_path)
    differing = trainer.weights.begin_differing
    trainer.weights.begin_differing = lambda part: (
        (lambda: ["norm.weight"]) if trainer.step == 3 else differing(part))
    with pytest.raises(StaleWeightsError, match="the run names the checkpoint to go on from"):
        trainer.fit()
    assert [found.step for found in list_checkpoints(tmp_path)] == [2, 3]
    shown = "".join(capsys.readouterr().out.split())
    assert f"resume={list_checkpoints(tmp_path)[0].folder},thelastcheckpointthatwas" in shown


def test_an_error_of_any_class_leaves_a_checkpoint(make_config, tmp_path):
    """A user's environment, reward or estimator may raise anything."""
    trainer = make_trainer(make_config(train={"checkpoint_frequency": 0}), tmp_path)
    ends_in(trainer, trainer.collector.env, "step", lambda: {}["no such column"], call=3)
    with pytest.raises(KeyError, match="no such column"):
        trainer.fit()
    assert [found.step for found in list_checkpoints(tmp_path)] == [2]


def out_of_memory():
    raise torch.OutOfMemoryError("no memory left")


@pytest.mark.parametrize(("fault", "error"), [
    (out_of_memory, RuntimeError),
    (lambda: [os.kill(os.getpid(), signal.SIGINT) for _ in range(2)], Stopped)])
def test_weights_between_two_steps_on_one_batch_are_not_saved(
        make_config, tmp_path, capsys, fault, error):
    """A run that went on from them would train a part of the batch again."""
    config = make_config(train={"checkpoint_frequency": 2, "optim_batch_size": 4})
    trainer = make_trainer(config, tmp_path)
    ends_in(trainer, trainer.learner.optimizer, "step", fault, call=7)
    with pytest.raises(error):
        trainer.fit()
    assert [found.step for found in list_checkpoints(tmp_path)] == [2]
    assert "the present state could not be saved" in " ".join(capsys.readouterr().out.split())
    resumed = make_trainer(config, tmp_path, list_checkpoints(tmp_path)[-1])
    resumed.fit()
    assert resumed.learner.optimizer.steps == 2 * 5


def test_a_failure_before_the_first_step_on_a_batch_is_saved(make_config, tmp_path):
    config = make_config(train={"checkpoint_frequency": 0, "optim_batch_size": 4})
    trainer = make_trainer(config, tmp_path)
    ends_in(trainer, trainer.learner, "_optimizer_batches", out_of_memory, call=3)
    with pytest.raises(RuntimeError, match="no memory left"):
        trainer.fit()
    assert [found.step for found in list_checkpoints(tmp_path)] == [2]


def test_a_second_ctrl_c_saves_nothing_as_it_says(make_config, tmp_path):
    trainer = make_trainer(make_config(train={"checkpoint_frequency": 0}), tmp_path)
    ends_in(trainer, trainer.weights, "publish", lambda: [
        os.kill(os.getpid(), signal.SIGINT) for _ in range(2)], call=3 + SELF_TEST)
    with pytest.raises(Stopped):
        trainer.fit()
    assert list_checkpoints(tmp_path) == []


def test_a_step_that_fails_after_a_signal_ends_with_the_signals_code(make_config, tmp_path):
    """As when all processes of a job get it, the engine's among them."""
    trainer = make_trainer(make_config(train={"checkpoint_frequency": 0}), tmp_path)

    def fail():
        os.kill(os.getpid(), signal.SIGTERM)
        raise EngineError("the engine is gone")

    ends_in(trainer, trainer.weights, "publish", fail, call=3 + SELF_TEST)
    with pytest.raises(Stopped) as raised:
        trainer.fit()
    assert raised.value.exit_code == 143
    assert [found.step for found in list_checkpoints(tmp_path)] == [3]


def test_a_signal_that_compiled_code_wraps_is_still_that_signal(capsys):
    with pytest.raises(SystemExit) as ended, signals_end_the_process():
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(10)
        except Stopped as stopped:
            raise SystemError("returned a result with an exception set") from stopped
    assert ended.value.code == 130
    assert "stopped by SIGINT" in capsys.readouterr().err
    with pytest.raises(SystemError, match="a fault of its own"), signals_end_the_process():
        raise SystemError("a fault of its own")


@pytest.mark.parametrize("handler", ["lambda *_: None", "lambda number, _: sys.exit(number)"])
def test_a_thread_ends_what_a_library_would_keep(handler):
    code = (
        "import os, signal, sys, time\n"
        "from grpo.training.stopping import a_thread_ends_at_once\n"
        "with a_thread_ends_at_once(lambda: os.write(1, b'cleaned up ')):\n"
        f"    signal.signal(signal.SIGTERM, {handler})\n"
        "    try:\n"
        "        os.write(1, b'ready ')\n"
        "        time.sleep(30)\n"
        "    finally:\n"
        "        time.sleep(30)\n")
    with subprocess.Popen([sys.executable, "-c", code], text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE) as process:
        assert process.stdout.read(6) == "ready "
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (143, "cleaned up ", "\nstopped by SIGTERM\n")
