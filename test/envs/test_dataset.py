"""Problems of any data set by names of columns, and mixtures of several."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from grpo.envs.rewards import gsm8k
from grpo.envs.tasks import make_task

ROWS = [{"q": f"{n}+1?", "a": n + 1, "level": n % 3} for n in range(20)]
COLUMNS = {"prompt_column": "q", "answer_column": "a"}


def jsonl(path: Path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def as_json(path: Path) -> None:
    path.write_text(json.dumps(ROWS))


def as_csv(path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(ROWS[0]))
        writer.writeheader()
        writer.writerows(ROWS)


def as_parquet(path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)


@pytest.mark.parametrize("suffix, write", [
    ("jsonl", lambda path: jsonl(path, ROWS)), ("json", as_json), ("csv", as_csv),
    pytest.param("parquet", as_parquet, marks=pytest.mark.slow)])
def test_files_of_every_kind_are_the_same_problems(tmp_path, suffix, write):
    write(tmp_path / f"sums.{suffix}")
    task = make_task("dataset", path=str(tmp_path / f"sums.{suffix}"), num_test=5, **COLUMNS)
    problems = {p.id: p for p in task.train + task.test}
    assert (len(task.train), len(task.test), len(problems)) == (15, 5, 20)
    assert {(p.prompt[-1]["content"], p.answer) for p in problems.values()} == {
        (row["q"], str(row["a"])) for row in ROWS}
    assert all(p.prompt[0]["role"] == "system" for p in problems.values())
    assert str(task.train[0].row["level"]) in "012"
    first = task.train[0]
    assert gsm8k(f"<answer>{first.answer}</answer>", first) == (1.0, True)


def test_what_is_held_out_depends_on_the_seed_alone(tmp_path):
    path = jsonl(tmp_path / "sums.jsonl", ROWS)

    def held_out(**options):
        return [p.id for p in make_task("dataset", path=path, **COLUMNS, **options).test]

    assert held_out(num_test=5) == held_out(num_test=5, num_train=3)
    assert held_out(num_test=5) == held_out(num_test=9)[:5] != held_out(num_test=5, seed=1)


def test_a_folder_has_files_of_splits(tmp_path):
    jsonl(tmp_path / "train.jsonl", ROWS)
    jsonl(tmp_path / "final.jsonl", ROWS[:3])
    task = make_task("dataset", path=str(tmp_path), test_split="final", **COLUMNS)
    assert (len(task.train), [p.answer for p in task.test]) == (17, ["1", "2", "3"])
    assert len({p.id for p in task.train + task.test}) == 20
    with pytest.raises(FileNotFoundError, match="no split 'dev', .* it has final.jsonl, train"):
        make_task("dataset", path=str(tmp_path), train_split="dev", **COLUMNS)


@pytest.mark.parametrize("options, held_out", [
    ({"path": "repeated.jsonl", "num_test": 5}, 5),
    ({"path": ".", "test_split": "part", "num_test": 2}, 2),
    ({"dataset_mixture": {"datasets": [{"id": "repeated.jsonl"}, {"id": "part.jsonl"}],
                          "test_split_size": 5}}, 5)])
def test_no_prompt_of_the_test_is_trained_on(tmp_path, monkeypatch, options, held_out):
    monkeypatch.chdir(tmp_path)
    jsonl(tmp_path / "repeated.jsonl", ROWS + ROWS)
    jsonl(tmp_path / "train.jsonl", ROWS)
    jsonl(tmp_path / "part.jsonl", ROWS[:10])
    task = make_task("dataset", **options, **COLUMNS)
    train, test = ({p.prompt[-1]["content"] for p in split} for split in (task.train, task.test))
    assert (len(task.test), len(train | test)) == (held_out, 20) and not train & test
    with pytest.raises(ValueError, match="all 20 training prompts of . are held out"):
        make_task("dataset", path=".", test_split="train", **COLUMNS)


@pytest.mark.parametrize("options, key", [
    ({"test_split": "test"}, "env.task.test_split='test'"),
    ({"train_split": "dev"}, "env.task.train_split='dev'"),
    ({"config": "x"}, "env.task.config='x'"),
    ({"path": ".", "config": "x"}, "env.task.config='x'"),
    ({"path": None, "dataset_mixture": {"datasets": [{"id": "sums.jsonl", "split": "dev"}]}},
     "env.dataset_mixture.datasets.0..split='dev'"),
    ({"path": None, "dataset_mixture": {"datasets": [{"id": "sums.jsonl", "config": "x"}]}},
     "env.dataset_mixture.datasets.0..config='x'")])
def test_what_a_file_has_none_of_is_refused(tmp_path, monkeypatch, options, key):
    monkeypatch.chdir(tmp_path)
    jsonl(tmp_path / "sums.jsonl", ROWS)
    with pytest.raises(ValueError, match=f"{key} would be ignored: (sums.jsonl|.) is a (fi|fo)"):
        make_task("dataset", **{"path": "sums.jsonl", **options}, **COLUMNS)


def test_a_chat_is_used_as_it_is_and_its_last_message_is_the_answer(tmp_path):
    chat = [{"role": "system", "content": "Own."}, {"role": "user", "content": "1+1?"},
            {"role": "assistant", "content": "2"}]
    path = jsonl(tmp_path / "chats.jsonl", [{"chat": chat}, {"chat": chat[1:]}])
    task = make_task("dataset", path=path, prompt_column="chat", num_test=0,
                     system_prompt="Given.")
    assert sorted(p.prompt[0]["content"] for p in task.train) == ["Given.", "Own."]
    assert {p.prompt[-1]["content"] for p in task.train} == {"1+1?"}
    assert {p.answer for p in task.train} == {"2"}


@pytest.mark.parametrize("rows, options, message", [
    (ROWS, {"prompt_column": "question"},
     "line 1: env.prompt_column='question' is no column; the columns are q, a, level"),
    (ROWS, {"prompt_column": None}, "env.prompt_column is not set; the columns are q, a, level"),
    (ROWS, {"answer_column": "gold"}, "env.answer_column='gold' is no column; the columns are q"),
    ([{"q": 3, "a": 1}], {}, "env.prompt_column='q' must hold a text, or a list of messages"),
    ([{"q": "?", "a": [1]}], {}, "env.answer_column='a' must hold a text or a number, got .1."),
    ([{"q": [{"role": "assistant", "content": "2"}], "a": 1}], {}, "nothing before the assistant"),
    (["text"], {}, "expected a table of columns, got 'text'"),
    (ROWS, {"num_test": 21}, "more than the 20 rows"),
    (ROWS, {"path": "sums.txt"}, "no file|sums.txt"),
    (ROWS, {"path": None}, "give one of them"),
    (ROWS, {"dataset_mixture": {"datasets": [{"id": "x"}]}}, "give one of them")])
def test_what_cannot_be_read_is_named_with_what_is_there(tmp_path, rows, options, message):
    path = jsonl(tmp_path / "sums.jsonl", rows)
    with pytest.raises((ValueError, OSError, ImportError), match=message):
        make_task("dataset", **{"path": path, "num_test": 0, **COLUMNS} | options)


# -- mixtures -------------------------------------------------------------------------------------


def mixture(tmp_path, *entries, **more):
    for name in ("one", "two"):
        jsonl(tmp_path / f"{name}.jsonl",
              [{"q": f"{name} {n}?", "a": n, "text": str(n)} for n in range(40)])
    return {"datasets": [entry | {"id": str(tmp_path / entry["id"])} for entry in entries]} | more


def test_weights_are_fractions_of_the_splits_and_a_share_is_held_out(tmp_path):
    given = mixture(tmp_path, {"id": "one.jsonl", "weight": 0.5}, {"id": "two.jsonl"},
                    seed=3, test_split_size=0.1)
    task = make_task("dataset", dataset_mixture=given, **COLUMNS)
    everything = task.train + task.test
    counts = [sum(name in p.id for p in everything) for name in ("one", "two")]
    assert (counts, len(task.test), len({p.id for p in everything})) == ([20, 40], 6, 60)
    again = make_task("dataset", dataset_mixture=given, **COLUMNS)
    assert (again.train, again.test) == (task.train, task.test)
    other = make_task("dataset", dataset_mixture=given | {"seed": 4}, **COLUMNS)
    assert {p.id for p in other.train} != {p.id for p in task.train}


def test_null_in_a_mixture_is_not_given(tmp_path):
    nothing = {"weight": None, "split": None, "config": None, "columns": None}
    tasks = [make_task("dataset", dataset_mixture=mixture(
                 tmp_path, {"id": "one.jsonl"} | more, test_split_size=4), **COLUMNS)
             for more in ({}, nothing)]
    assert tasks[0].train == tasks[1].train and len(tasks[1].train) == 36


def test_columns_are_kept_and_may_have_other_names_in_one_of_them(tmp_path):
    given = mixture(tmp_path, {"id": "one.jsonl", "columns": ["q", "a"]},
                    {"id": "two.jsonl", "answer_column": "text"}, test_split_size=8)
    task = make_task("dataset", dataset_mixture=given, **COLUMNS)
    assert len(task.test) == 8 and {len(p.row) for p in task.train} == {2, 3}


@pytest.mark.parametrize("change, message", [
    ({"datasets": []}, "datasets must be a list with at least one"),
    ({"datasets": [{"weight": 1}]}, r"datasets\[0\]=.* names no data set"),
    ({"datasets": [{"id": "a", "wieght": 1}]}, r"datasets\[0\].wieght=1: there is no such key"),
    ({"datasets": [{"id": "a", "weight": 2}]}, "weight=2 must be a fraction of the split"),
    ({"dataset": []}, "env.dataset_mixture.dataset=.*: there is no such key; use some of datasets"),
    ({"test_split_size": 1.5}, "test_split_size=1.5 must be a share between 0 and 1"),
    ({"test_split_size": -1}, "test_split_size=-1 must be an integer")])
def test_a_mixture_that_is_none_is_explained(change, message):
    with pytest.raises(ValueError, match=message):
        make_task("dataset", dataset_mixture={"datasets": [{"id": "a"}]} | change, **COLUMNS)


def test_columns_that_a_data_set_of_the_mixture_lacks_are_named(tmp_path):
    given = mixture(tmp_path, {"id": "one.jsonl", "columns": ["q", "gold"]})
    with pytest.raises(ValueError, match="columns='gold' is no column; the columns are q, a, text"):
        make_task("dataset", dataset_mixture=given, **COLUMNS)
    with pytest.raises(ValueError, match="env.task.num_test=3 would be ignored"):
        make_task("dataset", dataset_mixture=given, num_test=3, **COLUMNS)


@pytest.mark.slow  # importing datasets takes seconds
def test_a_data_set_of_the_hub_is_read_by_its_id(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    import datasets

    asked = []

    def load(name, config, split):
        asked.append((name, config, split))
        if split == "nowhere":
            raise FileNotFoundError("no such split")
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr("datasets.load_dataset", load)
    task = make_task("dataset", path="org/sums", config="main", test_split="test", num_test=4,
                     **COLUMNS)
    assert asked == [("org/sums", "main", "train"), ("org/sums", "main", "test")]
    assert (len(task.train), len(task.test)) == (16, 4)
    with pytest.raises(FileNotFoundError, match="check env.path and the network"):
        make_task("dataset", path="org/sums", train_split="nowhere", **COLUMNS)
