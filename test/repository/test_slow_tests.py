"""tools/slow_tests.py: what runs in which order, within its time, and what it says of the rest."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO / "tools"))

import slow_tests  # noqa: E402
from slow_tests import Session, Unit, in_order, make_units, record  # noqa: E402


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A folder of slow tests that the tool takes for its repository."""
    sources = {
        "test_good.py": "def test_a(): pass\ndef test_b(): pytest.skip('no')\n",
        "test_bad.py": "def test_a(): assert 1 == 2\n",
        "test_endless.py": "def test_a():\n    import time\n    time.sleep(60)\n",
        "test_slower.py": "def test_a():\n    import time\n    time.sleep(3)\n",
        "test_broken.py": "import no_such_module\n",
    }
    for name, source in sources.items():
        (tmp_path / name).write_text(f"import pytest\npytestmark = pytest.mark.slow\n{source}")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow: s\n    gpu: g\n")
    monkeypatch.setattr(slow_tests, "REPO", tmp_path)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take longer than these tests
    return tmp_path


def run(folder: Path, *units: Unit, budget: float = 60.0, **options) -> Session:
    session = Session(units, budget=budget, lanes=2, folder=folder / "logs", **options)
    session.run()
    return session


def test_counts_are_added_up_and_a_failure_is_shown(files, capsys):
    session = run(files, *(Unit(f"test_{name}.py", 1.0) for name in ("good", "bad", "broken")))
    assert sorted(session.failed) == ["test_bad.py", "test_broken.py"]
    assert slow_tests.closing_line(session, 3.0) == (
        "1 failed, 1 passed, 1 skipped, 1 errors in 3.00s")
    printed = capsys.readouterr().out
    assert "assert 1 == 2" in printed and "no_such_module" in printed
    assert "test_good.py: 1 passed, 1 skipped" in printed
    assert (session.waiting, session.unfinished) == ([], [])


def test_the_budget_is_kept_and_what_did_not_run_is_known(files):
    started = time.monotonic()
    endless, good, long = (Unit("test_endless.py", 1.0), Unit("test_good.py", 1.0),
                           Unit("test_bad.py", 99.0))
    session = run(files, long, endless, good, budget=5.0)
    assert time.monotonic() - started < 15
    assert (session.waiting, session.unfinished) == ([long], [endless])
    assert list(session.seconds) == ["test_good.py"] and session.failed == []


def test_what_always_runs_has_the_time_that_it_takes_and_may_not_be_skipped(files, capsys):
    slower, good, bad = (Unit(f"test_{name}.py", 99.0) for name in ("slower", "good", "bad"))
    session = run(files, slower, good, bad, budget=1.0, always=[slower.name, good.name])
    assert session.seconds.keys() == {slower.name, good.name} and session.waiting == [bad]
    assert session.failed == [good.name]
    printed = capsys.readouterr().out
    assert "test_good.py:4: no" in printed
    assert "it was skipped, and is to run at every commit" in printed


def test_every_unit_comes_first_at_some_commit_and_always_at_the_same():
    units = [Unit(name, 1.0) for name in "abcdefg"]
    firsts = {in_order(units, changed=[], commit=f"{number:x}")[0].name for number in range(7)}
    assert firsts == set("abcdefg")
    for commit in ("0", "7309f3ad1a2b130923ecf2b3daef0677083f1b66"):
        ordered = in_order(units, changed=["e"], commit=commit)
        assert ordered == in_order(units, changed=["e"], commit=commit)
        assert ordered[0].name == "e" and sorted(unit.name for unit in ordered) == list("abcdefg")


def test_what_always_runs_comes_first_and_is_missed_if_it_is_not_there(monkeypatch):
    monkeypatch.setattr(slow_tests, "ALWAYS", ("b.py::two", "c.py"))
    units = make_units(["a.py::one", "b.py::one", "b.py::two", "c.py::one", "c.py::two"], {})
    names = [unit.name for unit in units]
    assert names == ["a.py", "b.py::one", "b.py::two", "c.py"]
    ordered = in_order(units, changed=["b.py"], commit="0", always=slow_tests.ALWAYS)
    assert [unit.name for unit in ordered] == ["b.py::two", "c.py", "b.py::one", "a.py"]
    with pytest.raises(ValueError, match="no such slow test: b.py::three; was it renamed?"):
        in_order(units, changed=[], commit="0", always=["b.py::three"])


def test_a_long_file_is_run_test_by_test_and_recorded_as_a_whole(tmp_path):
    path = tmp_path / "seconds.json"
    path.write_text('{"passed": {"a.py": 600, "c.py": 1}, "others": {}}')
    tests = ["a.py::one", "a.py::two", "b.py::one", "b.py::two"]
    units = make_units(tests, json.loads(path.read_text())["passed"])
    assert [unit.name for unit in units] == ["a.py::one", "a.py::two", "b.py"]
    record({"a.py::one": 400.0, "b.py": 30.4}, units, path=path)
    assert json.loads(path.read_text()) == {
        "passed": {"a.py": 600, "b.py": 30, "c.py": 1}, "others": {}}
    both = {"a.py::one": 400.0, "a.py::two": 115.0}
    record(both, units, ["a.py::two"], path)
    assert json.loads(path.read_text()) == {"passed": {"b.py": 30, "c.py": 1},
                                            "others": {"a.py": 500}}
    record(both, units, path=path)
    assert json.loads(path.read_text())["passed"]["a.py"] == 500


def test_recorded_files_are_there():
    recorded = json.loads(slow_tests.SECONDS.read_text())
    assert recorded.keys() == {"passed", "others"}
    assert not recorded["passed"].keys() & recorded["others"].keys()
    assert all((REPO / file).is_file() for files in recorded.values() for file in files)


def test_ci_fails_with_any_of_its_parts():
    lines = (REPO / ".ci" / "run").read_text().splitlines()
    calls = [line for line in lines if line.startswith("make ")]
    assert [call.split()[1] for call in calls] == ["atropos-env", "lint", "test", "test-slow"]
    assert all(call.endswith("|| failed=1") for call in calls)
    assert lines[-1] == 'exit "$failed"'
