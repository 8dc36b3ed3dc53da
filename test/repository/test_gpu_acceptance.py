"""tools/gpu_acceptance.py: each command of the pages has a part, and parts keep to their plan."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from grpo.config.asynchronous import AsyncConfig
from grpo.config.schema import Config, load_config

from ..config.configs import composed
from ..support import REPO, wait_until
from ..support import runs as running

sys.path[:0] = [str(REPO / "tools"), str(REPO / "benchmarks")]

from acceptance import rows  # noqa: E402
from acceptance.compare import compare  # noqa: E402
from acceptance.figures import read_benchmark, read_pytest, read_run  # noqa: E402
from acceptance.pages import PAGES, page_commands  # noqa: E402
from acceptance.report import Report, passed_before, read_earlier, sources, table  # noqa: E402
from acceptance.schedule import Missed, Outcome, Part  # noqa: E402

# -- what is run ----------------------------------------------------------------------------------


@pytest.fixture
def pages(tmp_path):
    """A copy of the pages, to write in."""
    for page in PAGES:
        (tmp_path / page).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / page).write_text((REPO / page).read_text())
    return tmp_path


def test_each_command_of_the_pages_has_a_part_or_a_reason():
    covered = {command for part in rows.all_parts(1) for command in part.covers}
    commands = {command.text for command in page_commands()}
    assert len(covered) > 35
    assert commands == covered | set(rows.not_run())


@pytest.mark.parametrize("command", [
    "python sota-implementations/grpo/distill.py model.name=tiny", "make fly",
    "python -m grpo.run.cli.atropos --model-name tiny"])
def test_a_command_of_a_new_kind_is_refused_by_name(pages, command):
    guide = pages / "docs/weights.md"
    guide.write_text(f"{guide.read_text()}\n```bash\n{command}\n```\n")
    with pytest.raises(rows.UnknownCommandError, match=re.escape(f"weights.md has the command "
                                                                 f"'{command}'")):
        rows.all_parts(1, root=pages)


def test_a_new_run_on_a_page_is_run_without_a_line_here(pages):
    readme = pages / "README.md"
    readme.write_text(f"{readme.read_text()}\n```bash\n{rows.SCRIPT} preset=sapo \\\n"
                      "    train.epochs=2\n```\n")
    part, = (part for part in rows.all_parts(1, root=pages) if "sapo" in part.name)
    assert part.script.startswith("python $REPO/sota-implementations/grpo/grpo.py preset=sapo "
                                  "train.epochs=2 ")


def test_what_takes_long_is_begun_before_what_does_not():
    parts = rows.all_parts(2)
    begun = [part for part in parts if not part.missing]
    awaited = {rows.PREPARE, *(name for part in begun for name in part.behind)}
    rest = [part for part in begun if not part.alone and part.name not in awaited]
    before = rows.seconds_before()
    took = {part.name: before.get(part.name, part.limit) for part in begun}
    assert begun[-len(rest):] == sorted(rest, key=lambda part: (-part.gpus, -took[part.name]))
    assert rest[0].gpus == 2 and took[rest[0].name] > took[rest[-1].name] > 0


def test_what_make_starts_is_what_runs():
    def recipe(target: str) -> str:
        done = subprocess.run(["make", "--dry-run", "-o", ".venv/ready-auto", target], cwd=REPO,
                              capture_output=True, text=True, timeout=60, check=True)
        return " ".join(done.stdout.replace("\\\n", " ").split())

    assert rows.MAKE["make train"].removeprefix("python ") in recipe("train")
    atropos = next(command.text for command in page_commands()
                   if command.text.startswith(rows.ATROPOS))
    assert " ".join(shlex.split(atropos)[1:]).split(" --eval-task")[0] in recipe("train-atropos")


def test_parts_with_atropos_run_beside_each_other_and_take_little_of_the_gpu():
    parts = [part for part in rows.all_parts(1) if "grpo.run.cli.launch" in part.script]
    assert len(parts) == 3
    assert all("--kv-cache-memory-bytes" in part.script for part in parts)
    claimed = [claim for part in parts for claim in part.claims]
    assert len(set(claimed)) == len(claimed) == 3 * 2 + 4


def test_the_run_that_is_resumed_differs_in_its_length_alone():
    part = next(part for part in rows.all_parts(1) if part.name == "README: grpo.py resume=auto")
    first, longer = (set(shlex.split(line)) for line in part.script.splitlines())
    assert longer - first == {"resume=auto", "train.total_dialog_turns=160"}
    assert first - longer == {"train.total_dialog_turns=96"}
    assert "optimizer.schedule=constant" in first


@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_parts_that_need_more_gpus_are_left_out_with_the_number(gpus):
    parts = rows.all_parts(gpus)
    assert len({part.name for part in parts}) == len(parts)
    assert all(name in {part.name for part in parts} for part in parts for name in part.after)
    needy = {part.gpus for part in parts if re.fullmatch(r"needs \d GPUs", part.missing)}
    assert needy == {number for number in (2, 3, 4) if number > gpus}
    assert not [part for part in parts if part.gpus > gpus and not part.missing]
    leaders = {name for part in parts for name in part.behind if not part.alone}
    assert len(leaders) == 2 + (gpus > 1)  # of models that several parts have
    early = {name for part in parts if part.alone for name in part.behind}
    assert early > leaders and len(early - leaders) > 12  # objectives, short tests
    assert not [part for part in parts
                if part.name in early and (part.missing or set(part.behind) - leaders)]


@pytest.mark.parametrize(("package", "named"), [
    ("reasoning_gym", "reasoning-gym"), ("verifiers", "'verifiers>=0.1.14,<0.2'")])
def test_commands_with_a_package_are_missing_where_it_is_not_installed(monkeypatch, package, named):
    find_spec = rows.importlib.util.find_spec

    def missing() -> set[str]:
        return {part.missing for part in rows.all_parts(1) if f"env={package}" in part.script}

    monkeypatch.setattr(rows.importlib.util, "find_spec", lambda name: object())
    assert missing() == {""}
    monkeypatch.setattr(rows.importlib.util, "find_spec",
                        lambda name: None if name == package else find_spec(name))
    assert missing() == {f"needs `pip install {named}`"}


def runs() -> list[list[str]]:
    lines = [line for part in rows.all_parts(4) for line in part.script.splitlines()]
    return [shlex.split(line.split("grpo/grpo", 1)[1]) for line in lines if "grpo/grpo" in line]


def test_every_run_is_a_configuration_that_works():
    assert len(runs()) > 45
    for script, *arguments in runs():
        schema = AsyncConfig if "async" in script else Config
        config = "grpo_async" if "async" in script else "grpo"
        if arguments and arguments[0] == "--config-name":
            config, arguments = arguments[1], arguments[2:]
        arguments = [a.replace("train.seed=0,1,2", "train.seed=0") for a in arguments
                     if a != "--multirun"]
        load_config(composed(config, *arguments), schema)


def test_what_the_page_sets_stays():
    text = f"{rows.SCRIPT} env.reward=my:own model.name=Qwen/Qwen2.5-1.5B-Instruct"
    words = rows.smaller(text).split()
    assert [word for word in words if word.startswith("env.reward=")] == ["env.reward=my:own"]
    assert "model.name=$WORK/models/1.5b" in words
    assert not [word for word in words if word.startswith("model.warm_start_steps")]


# -- figures --------------------------------------------------------------------------------------


def run_folder(folder: Path, *steps: dict) -> Path:
    (folder / "outputs").mkdir()
    lines = [{"step": 0, "eval/accuracy": 0.5}, *steps]
    (folder / "outputs" / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines) + '{"step": 9, "time/st')
    (folder / "log").write_text("held-out accuracy 0.500 -> 0.600\n")
    return folder


STEP = {"time/step": 2.0, "canary/mean_abs_diff": 1e-3, "policy/ratio_max": 1.01}


def test_a_run_has_all_iterations_and_proofs(tmp_path):
    run_folder(tmp_path, {**STEP, "time/step": 9.0}, STEP, STEP)
    (tmp_path / "outputs" / "model.safetensors").write_bytes(b"\0" * 50_000_001)
    figures = read_run(3, says="held-out accuracy")(tmp_path)
    assert (figures["step_seconds"], figures["first_step_seconds"]) == (2.0, 9.0)
    assert not (tmp_path / "outputs" / "model.safetensors").exists()
    for read, message in ((read_run(4), "3 iterations of 1 runs, not 4 of 1"),
                          (read_run(3, runs=2), "not 6 of 2"),
                          (read_run(3, says="resumed"), "does not say 'resumed'")):
        with pytest.raises(Missed, match=message) as missed:
            read(tmp_path)
        assert missed.value.figures["iterations"] == 3


def test_a_run_whose_updates_nobody_proved_does_not_pass(tmp_path):
    run_folder(tmp_path, {"time/step": 1.0})
    with pytest.raises(Missed, match="no update was proved"):
        read_run(1)(tmp_path)


def test_pytests_closing_line_is_read(tmp_path):
    log = tmp_path / "log"
    log.write_text("7 passed in the text\n"
                   "==== 3 passed, 1 skipped, 2 warnings in 61.20s (0:01:01) =====\n")
    assert read_pytest(tmp_path)["summary"] == "3 passed, 1 skipped"
    log.write_text("1 skipped in 2.20s\n")
    with pytest.raises(Missed, match="no test passed"):
        read_pytest(tmp_path)


def test_an_unfinished_benchmark_leaves_its_figures(tmp_path):
    result = {"complete": False, "seconds": {"step": 1.25}, "machine": "?"}
    (tmp_path / "result.json").write_text(json.dumps(result))
    with pytest.raises(Missed, match="not complete") as missed:
        read_benchmark("seconds/step")(tmp_path)
    assert missed.value.figures == {"summary": "seconds/step 1.25", "complete": False,
                                    "seconds": {"step": 1.25}}


@pytest.mark.parametrize(("step", "gib", "fault"), [
    (4.0, 60.0, None), (5.0, 60.0, "0.50 of the peer's"), (4.0, 80.0, "80.0 GiB in use"),
    (4.0, None, "was not measured")])
def test_the_peer_is_beaten_in_time_and_memory(step, gib, fault):
    def result(seconds, gib):
        return {"work": "w", "seconds": {"step": seconds},
                "memory_gib": {"peak": [gib] if gib else []}}

    figures, faults = compare(result(step, gib), result(10.0, 70.0), at_most=0.45)
    assert figures["ratio"] == step / 10
    assert [fault in said for said in faults] == [True] if fault else faults == []


# -- the file -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("last", "verdict"), [
    (Outcome("passed", seconds=3.0, figures={"summary": "s a step 2"}), True),
    (Outcome("skipped", "needs 2 GPUs"), True),
    (Outcome("not run", "time was up"), False), (Outcome("failed", "exit code 1"), False),
    (Outcome("running"), False)])
def test_the_file_says_what_came_of_each_part_and_of_all(tmp_path, capsys, last, verdict):
    parts = [Part("models and machine", "true", 30.0), Part("last", "run one\nrun two", 60.0)]
    schedule = SimpleNamespace(parts=parts, gpus=["0"], outcomes={
        "models and machine": Outcome("passed", seconds=1.0), "last": last})
    (tmp_path / "machine.json").write_text('{"machine": "NVIDIA H200", "commit": "1234abc"}')
    report = Report(tmp_path / "results" / "acceptance.json", tmp_path, command="accept")
    report.update(schedule)
    report.update(schedule)
    written = json.loads((tmp_path / "results" / "acceptance.json").read_text())
    assert (written["accepted"], written["gpus"]) == (verdict, 1)
    assert written["complete"] == (last.status != "running")
    assert (written["machine"], written["commit"]) == ("NVIDIA H200", "1234abc")
    assert written["parts"][1]["status"] == last.status
    assert written["parts"][1]["command"] == ["run one", "run two"]
    # Once for each part that has ended.
    assert capsys.readouterr().out.count("\n") == 2 - (last.status == "running")
    assert table(schedule).splitlines()[-1].startswith("accepted" if verdict else "NOT accepted")


def test_a_second_call_runs_what_the_first_did_not_pass(tmp_path):
    parts = [Part("model", "make", 30.0), Part("done", "true", 30.0, after=("model",)),
             Part("other now", "true", 30.0), Part("left", "true", 30.0, after=("model",)),
             Part("also done", "true", 30.0)]
    outcomes = {part.name: Outcome("passed", seconds=2.0, figures={"summary": part.name})
                for part in parts}
    outcomes["left"] = Outcome("not run", "time was up")
    out = tmp_path / "acceptance.json"

    def write(**options) -> dict:
        Report(out, tmp_path, command="accept", **options).update(
            SimpleNamespace(parts=parts, gpus=["0"], outcomes=outcomes))
        return json.loads(out.read_text())

    written = write()
    parts[2] = Part("other now", "false", 30.0)
    kept = passed_before(parts, read_earlier(out, gpus=1))
    assert set(kept) == {"done", "also done"}  # the model is made again, for what is left
    assert kept["done"] == outcomes["done"]
    outcomes["left"] = Outcome("passed", seconds=1.0)
    again = write(earlier=written)
    assert again["accepted"] and len(again["calls"]) == 2
    assert again["seconds"] == sum(call["seconds"] for call in again["calls"])
    assert set(passed_before(parts, again)) == {part.name for part in parts}


def test_what_passed_on_more_gpus_is_not_run_again_on_one_and_says_where(tmp_path):
    parts = [Part("of one", "true", 30.0), Part("of all there are", "true", 30.0, gpus=2),
             Part("of two", "true", 30.0, gpus=2)]
    out = tmp_path / "acceptance_2.json"
    Report(out, tmp_path, command="accept").update(SimpleNamespace(
        parts=parts, gpus=["0", "1"], outcomes={part.name: Outcome("passed", seconds=2.0)
                                                for part in parts}))
    parts[1:] = [Part("of all there are", "true", 30.0), replace(parts[2], missing="needs two")]
    kept = passed_before(parts, read_earlier(out), where=out.name)
    assert kept == {"of one": Outcome("passed", "in acceptance_2.json", 2.0)}
    one = tmp_path / "acceptance_1.json"
    Report(one, tmp_path, command="accept").update(SimpleNamespace(
        parts=parts, gpus=["0"], outcomes=kept | {
            part.name: Outcome("not run") for part in parts[1:]}))
    assert passed_before(parts, read_earlier(one, gpus=1)) == kept  # a third call says it as well


def test_a_result_of_other_sources_is_not_gone_on_with(tmp_path):
    out = tmp_path / "acceptance.json"
    assert read_earlier(out, gpus=1) == {}
    out.write_text('{"sources": "1234abc", "gpus": 1}')
    with pytest.raises(SystemExit, match="another state of the sources, 1234abc "):
        read_earlier(out, gpus=1)
    out.write_text(json.dumps({"sources": sources(), "gpus": 1}))
    with pytest.raises(SystemExit, match="number of GPUs, 1 and not 2"):
        read_earlier(out, gpus=2)


def test_the_sources_are_what_parts_run_and_no_page_or_other_test(tmp_path):
    for name in ("grpo/loss.py", "config/grpo.yaml", "test/gpu/test_one.py", "README.md",
                 "test/test_one.py", "grpo/__pycache__/loss.pyc"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("one")
    before = sources(tmp_path)
    for name, same in {"README.md": True, "test/test_one.py": True, "config/grpo.yaml": False,
                       "grpo/__pycache__/loss.pyc": True, "grpo/loss.py": False,
                       "test/gpu/test_one.py": False}.items():
        (tmp_path / name).write_text("two")
        sources.cache_clear()
        assert (sources(tmp_path) == before) is same, name
        (tmp_path / name).write_text("one")
        sources.cache_clear()


# -- the schedule ---------------------------------------------------------------------------------

#: A program as gpu_acceptance.py is, with parts of the test.
PROGRAM = """
import json, os, signal, sys, time
from dataclasses import replace
from pathlib import Path
sys.path[:0] = {paths!r}
import gpu_acceptance
from acceptance import schedule
from acceptance.family import adopt_orphans
from acceptance.schedule import Missed, Part, Schedule
schedule.GRACE, schedule.LINGER = 1.0, 1.0

folder = Path(sys.argv[1])
def changed(of):
    state = {{name: vars(outcome) for name, outcome in of.outcomes.items()}}
    temporary = folder / "state.tmp"
    temporary.write_text(json.dumps(state))
    temporary.replace(folder / "state.json")

def fails(_):
    raise Missed("not enough", {{"summary": "3"}})

adopt_orphans()
of = Schedule({parts}, gpus=["7", "8"], gib=100.0, jobs=4, seconds={seconds},
              folder=folder / "parts", environment={{"FOLDER": str(folder)}}, changed=changed)
signal.signal(signal.SIGTERM, lambda *_: of.stop("interrupted"))
of.run()
gpu_acceptance.end_orphans()
"""


@pytest.fixture
def program(tmp_path):
    """Start parts; wait for their end unless told otherwise."""
    started = []

    def start(*parts: str, seconds: float = 60.0):
        source = PROGRAM.format(parts=f"[{', '.join(parts)}]", seconds=seconds, paths=[
            str(REPO), str(REPO / "tools"), str(REPO / "benchmarks")])
        started.append(subprocess.Popen([sys.executable, "-c", source, str(tmp_path)]))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def state(folder: Path) -> dict:
    return json.loads((folder / "state.json").read_text())


def statuses(folder: Path) -> dict:
    return {name: outcome["status"] for name, outcome in state(folder).items()}


def gone(folder: Path, *names: str) -> bool:
    """Wait until the processes whose numbers parts wrote to files have ended."""
    pids = [int((folder / name).read_text()) for name in names]
    return wait_until(lambda: not any(map(running, pids)), seconds=5.0)


def test_each_part_ends_in_its_own_way(program, tmp_path):
    assert program(
        "Part('good', 'echo fine; echo $CUDA_VISIBLE_DEVICES >$FOLDER/gpus', 30, gpus=2)",
        "Part('bad', 'echo the reason; false; echo unreached', 30)",
        "Part('long', 'echo begun; sleep 60', 0.5)",
        "Part('deaf', 'trap \"\" TERM; echo $$ >$FOLDER/deaf; while true; do sleep 0.1; done', 1)",
        "Part('short of', 'true', 30, read=fails)",
        "Part('second', 'touch $FOLDER/second', 30, after=('good',))",
        "Part('third', 'touch $FOLDER/third', 30, after=('bad',))",
        "Part('next', 'test ! -e /proc/$(cat $FOLDER/deaf)', 30, behind=('deaf',))",
        "Part('elsewhere', 'touch $FOLDER/elsewhere', 30, missing='needs 3 GPUs', gpus=3)",
    ).wait(timeout=60) == 0
    found = state(tmp_path)
    assert statuses(tmp_path) == {
        "good": "passed", "bad": "failed", "long": "timed out", "deaf": "timed out",
        "short of": "failed", "second": "passed", "third": "not run", "next": "passed",
        "elsewhere": "skipped"}
    assert (tmp_path / "gpus").read_text() == "7,8\n"
    assert found["bad"]["log_end"] == ["the reason"] and "exit code 1" in found["bad"]["reason"]
    assert found["long"]["log_end"] == ["begun"] and 0.5 <= found["long"]["seconds"] < 5
    assert (found["short of"]["reason"], found["short of"]["figures"]) == (
        "not enough", {"summary": "3"})
    assert found["third"]["reason"] == "bad did not pass"
    assert gone(tmp_path, "deaf")
    assert (tmp_path / "second").exists() and not (tmp_path / "third").exists()
    assert not (tmp_path / "elsewhere").exists()


def test_only_what_parts_have_started_is_ended_wherever_it_went(program, tmp_path):
    own = subprocess.Popen(["sleep", "60"])
    try:
        program(
            # In a session of its own; its parent ends at once.
            "Part('leaves', 'setsid sleep 60 & echo $! >$FOLDER/child; sleep 1', 30)",
            "Part('killed', 'setsid sh -c \"echo \\$\\$ >$FOLDER/far; sleep 60; :\" & sleep 9', 1)",
            "Part('tidy', 'setsid sleep 0.8 & sleep 0.5', 30)",
        ).wait(timeout=60)
        found = state(tmp_path)
        assert statuses(tmp_path) == {"leaves": "failed", "killed": "timed out", "tidy": "passed"}
        assert found["leaves"]["reason"] == "left processes behind: sleep 60"
        assert gone(tmp_path, "child", "far")
        assert own.poll() is None
    finally:
        own.kill()
        own.wait()


def test_parts_share_gpus_by_memory_and_timed_ones_run_alone(program, tmp_path):
    script = ("echo {0} begins >>$FOLDER/order; echo $CUDA_VISIBLE_DEVICES >>$FOLDER/gpus; "
              "{1}; echo {0} ends >>$FOLDER/order")
    # A GPU each for the two, and the third beside one of them: each waits for all.
    together = "; ".join(f"until grep -q '{name} begins' $FOLDER/order; do sleep 0.1; done"
                         for name in "abd")

    def part(name: str, more: str = "") -> str:
        body = script.format(name, together if name in "abd" else "sleep 0.2")
        return f"Part({name!r}, {body!r}, 30{more})"

    program(part("a", ", gib=70"), part("b", ", gib=70"), part("c", ", gib=70"),
            part("d", ", gib=20"), part("model"), part("alone", ", gib=500, alone=True, after=("
                                                       "'model',)"), part("e"),
            part("never", ", alone=True, missing='no GPU'"),
            part("port 1", ", claims=frozenset({'port'})"),
            part("port 2", ", claims=frozenset({'port'})")).wait(timeout=60)
    assert statuses(tmp_path).pop("never") == "skipped"
    assert {*statuses(tmp_path).values()} == {"passed", "skipped"}
    order = (tmp_path / "order").read_text().splitlines()
    assert order[:4] == ["model begins", "model ends", "alone begins", "alone ends"]
    assert order.index("c begins") > min(order.index("a ends"), order.index("b ends"))
    assert order.index("port 1 ends") < order.index("port 2 begins")
    assert {"7", "8"} == set((tmp_path / "gpus").read_text().split())


def test_timed_parts_have_a_gpu_each(program, tmp_path):
    begun = "echo $CUDA_VISIBLE_DEVICES >>$FOLDER/gpus; echo {0} >>$FOLDER/order; sleep 1"
    program(*(f"Part({name!r}, {begun.format(name)!r}, 30, alone=True)" for name in "ab"),
            f"Part('other', {begun.format('other')!r}, 30)",
            f"Part('c', {begun.format('c')!r}, 30, alone=True)").wait(timeout=60)
    assert set(statuses(tmp_path).values()) == {"passed"}
    assert set((tmp_path / "gpus").read_text().split()[:2]) == {"7", "8"}
    assert (tmp_path / "order").read_text().split()[2:] == ["c", "other"]


def test_at_the_deadline_what_is_finished_is_written(program, tmp_path):
    started = time.monotonic()
    program("Part('quick', 'true', 30)",
            "Part('slow', 'echo so far; sleep 60', 60, alone=True, after=('quick',))",
            "Part('never', 'touch $FOLDER/never', 30)", seconds=3.0).wait(timeout=60)
    assert time.monotonic() - started < 6
    found = state(tmp_path)
    assert statuses(tmp_path) == {"quick": "passed", "slow": "not run", "never": "not run"}
    assert found["slow"]["reason"] == "time was up while it ran"
    assert found["slow"]["log_end"] == ["so far"] and found["never"]["reason"] == "time was up"
    assert not (tmp_path / "never").exists()


def test_a_signal_ends_the_parts_and_keeps_what_is_finished(program, tmp_path):
    process = program("Part('quick', 'true', 30)",
                      "Part('slow', 'echo $$ >$FOLDER/slow; sleep 60', 60)",
                      "Part('never', 'true', 30, after=('slow',))")
    wait_until(lambda: (tmp_path / "slow").exists() and statuses(tmp_path)["quick"] == "passed")
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 0
    assert statuses(tmp_path) == {"quick": "passed", "slow": "not run", "never": "not run"}
    assert gone(tmp_path, "slow")


def test_the_plan_is_printed_without_a_gpu_and_a_run_is_refused():
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    program = [sys.executable, str(REPO / "tools" / "gpu_acceptance.py")]
    listed = subprocess.run([*program, "--list"], capture_output=True, text=True, timeout=120,
                            env=environment, check=True).stdout
    assert "README: make train  (1 GPU" in listed and "    make test: the fast tests" in listed
    refused = subprocess.run(program, capture_output=True, text=True, timeout=60, env=environment)
    assert refused.returncode == 1 and "there is no GPU here" in refused.stderr
    wrong = subprocess.run([*program, "--list", "--only", "tset/*"], capture_output=True,
                           text=True, timeout=60, env=environment)
    assert wrong.returncode == 1 and "no part is called 'tset/*'" in wrong.stderr
