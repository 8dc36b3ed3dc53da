"""Tests of the GSM8K task on rows of their own making and, where present, on the real files."""

from __future__ import annotations

import importlib.util
import json
import random
import re
import time
from pathlib import Path

import pytest

from grpo.envs.rewards import gsm8k, normalize_number
from grpo.envs.tasks import Gsm8kTask, Problem, make_task
from grpo.envs.tasks.gsm8k import is_correct, reward

ROWS = [
    {"question": "Two cats have how many legs?", "answer": "2 * 4 = <<2*4=8>>8\n#### 8"},
    {"question": "A café sells 3 pies at $360. Income?", "answer": "3 * 360\n#### 1,080"},
    {"question": "5 below zero, one colder?", "answer": "-5 - 1\n####  -6 "},
]


def write_jsonl(path: Path, rows) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_jsonl(tmp_path / "train.jsonl", ROWS)
    write_jsonl(tmp_path / "test.jsonl", ROWS[:1])
    return tmp_path


class TestLocalFiles:
    def test_reads_both_splits_in_order(self, folder):
        task = make_task("gsm8k", data_path=str(folder))
        assert [p.answer for p in task.split("train")] == ["8", "1,080", "-6"]
        assert [p.id for p in task.train] == [f"gsm8k/train/{i}" for i in range(3)]
        assert [p.id for p in task.test] == ["gsm8k/test/0"]

    def test_prompt_is_the_system_message_then_the_question(self, folder):
        system, question = Gsm8kTask(data_path=folder).train[1].prompt
        assert system["role"] == "system"
        for tag in ("<think>", "</think>", "<answer>", "</answer>"):
            assert tag in system["content"]
        assert question == {"role": "user", "content": ROWS[1]["question"]}

    def test_system_prompt_can_be_replaced_or_left_out(self, folder):
        own = Gsm8kTask(data_path=folder, system_prompt="Be brief.").train[0].prompt
        assert own[0] == {"role": "system", "content": "Be brief."}
        bare = Gsm8kTask(data_path=folder, system_prompt=None).train[0].prompt
        assert [message["role"] for message in bare] == ["user"]

    def test_limits_keep_the_first_rows(self, folder):
        task = Gsm8kTask(data_path=folder, num_train=2, num_test=1)
        assert task.train == Gsm8kTask(data_path=folder).train[:2]

    def test_a_start_numbers_rows_on_and_on(self, folder):
        rows = [problem.id for problem in Gsm8kTask(data_path=folder).split("train")]
        for start in (1, len(rows) + 1, 5 * len(rows)):
            task = Gsm8kTask(data_path=folder, train_start=start, num_train=len(rows) - 1)
            first = start % len(rows)
            assert [problem.id for problem in task.split("train")] == (
                rows[first:] + rows[:first])[:-1]

    def test_blank_lines_and_a_byte_order_mark_are_no_rows(self, tmp_path):
        text = "\ufeff" + json.dumps(ROWS[0]) + "\n\n" + json.dumps(ROWS[1], ensure_ascii=False)
        (tmp_path / "train.jsonl").write_text(text + "\n \n", encoding="utf-8")
        task = Gsm8kTask(data_path=tmp_path, num_test=0)
        assert [p.prompt[-1]["content"] for p in task.train] == [r["question"] for r in ROWS[:2]]

    def test_a_split_of_no_rows_is_not_read_and_its_use_is_an_error(self, folder):
        (folder / "test.jsonl").unlink()
        task = Gsm8kTask(data_path=folder, num_test=0)
        assert len(task.train) == 3
        with pytest.raises(ValueError, match=f"'gsm8k': split 'test' is empty.*{folder.name}"):
            task.split("test")

    def test_an_empty_file_is_an_empty_split(self, folder):
        (folder / "train.jsonl").write_text("")
        with pytest.raises(ValueError, match="split 'train' is empty"):
            Gsm8kTask(data_path=folder).split("train")


class TestErrors:
    @pytest.mark.parametrize(("line", "complaint"), [
        ('{"question": "?", ', "not valid JSON"),
        ("[1, 2]", "expected an object"),
        ('{"question": "?"}', "key 'answer' is missing"),
        ('{"answer": "#### 1", "prompt": "?"}', "key 'question' is missing"),
        ('{"question": "?", "answer": 18}', "'answer' must be text"),
        ('{"question": "?", "answer": "it is 18"}', "must end in '#### <gold answer>'"),
        ('{"question": "?", "answer": "it is 18 ####  "}', "must end in '#### <gold answer>'"),
    ])
    def test_malformed_row_names_file_line_and_fault(self, folder, line, complaint):
        path = folder / "train.jsonl"
        path.write_text(json.dumps(ROWS[0]) + "\n\n" + line + "\n")
        with pytest.raises(ValueError, match=re.escape(f"{path}, line 3: ")) as error:
            Gsm8kTask(data_path=folder)
        assert complaint in str(error.value)

    def test_wrong_encoding_names_file_and_line(self, folder):
        path = folder / "test.jsonl"
        path.write_bytes('{"question": "café", "answer": "#### 1"}'.encode("latin-1"))
        with pytest.raises(ValueError, match=re.escape(f"{path}, line 1: not valid JSON")):
            Gsm8kTask(data_path=folder)

    def test_missing_file_or_folder_names_the_option(self, folder):
        (folder / "test.jsonl").unlink()
        with pytest.raises(FileNotFoundError, match=r"env.data_path=.*no such file.*test\.jsonl"):
            Gsm8kTask(data_path=folder)
        with pytest.raises(FileNotFoundError, match="env.data_path='.*nowhere' is not a folder"):
            Gsm8kTask(data_path=folder / "nowhere")

    def test_more_rows_than_exist_names_their_number(self, folder):
        with pytest.raises(ValueError, match="num_train=4, but the train split has only 3 rows"):
            Gsm8kTask(data_path=folder, num_train=4)

    @pytest.mark.parametrize("options", [{"dataset": "someone/gsm8k"}, {"config": "socratic"}])
    def test_data_set_beside_a_folder_would_be_ignored(self, folder, options):
        with pytest.raises(ValueError, match="would be ignored because env.data_path="):
            Gsm8kTask(data_path=folder, **options)

    @pytest.mark.parametrize("option", ["num_train", "num_test"])
    def test_negative_limit_is_named(self, folder, option):
        with pytest.raises(ValueError, match=f"{option}=-1"):
            Gsm8kTask(data_path=folder, **{option: -1})


class TestHub:
    def test_missing_package_says_what_to_install(self, monkeypatch):
        find_spec = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec",
                            lambda name, *more: None if name == "datasets" else find_spec(name))
        with pytest.raises(ImportError, match="pip install datasets"):
            Gsm8kTask()

    @pytest.mark.slow  # importing datasets takes seconds
    def test_reads_a_data_set(self, folder, tmp_path, monkeypatch):
        pytest.importorskip("datasets")
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
        configs = "".join(
            f"  - split: {split}\n    path: {split}.jsonl\n" for split in ("train", "test"))
        header = f"---\nconfigs:\n- config_name: main\n  data_files:\n{configs}---\n"
        (folder / "README.md").write_text(header)
        task = Gsm8kTask(dataset=str(folder), num_train=2)
        assert task.train == Gsm8kTask(data_path=folder, num_train=2).train
        assert task.test == Gsm8kTask(data_path=folder).test

    @pytest.mark.slow
    def test_unknown_data_set_names_the_option(self, tmp_path):
        pytest.importorskip("datasets")
        with pytest.raises(FileNotFoundError, match="check env.dataset .*set env.data_path"):
            Gsm8kTask(dataset=str(tmp_path / "nowhere"))


#: A gold answer, a response, whether it is right, and its reward.
EDGE_CASES = [
    ("1,080", "<answer>1080</answer>", True, 1.0),
    ("1080", "<answer>1,080.00</answer>", True, 1.0),
    ("1080", "It is 1,080.", True, 1.0),
    ("1080", r"\boxed{1{,}080}", True, 1.0),
    ("1080", "It is 1,081.", False, 0.1),
    ("18", "<answer>$18</answer>", True, 1.0),
    ("18", "#### $18.00", True, 1.0),
    ("18", "<answer>18 €</answer>", True, 0.1),  # training wants the bare number in a block
    ("18", "<answer>18 dollars</answer>", True, 0.1),
    ("18", "#### 18 dollars", True, 1.0),
    ("18", "<answer>18 m^2</answer>", True, 0.1),
    ("18", "He has 18 eggs.", True, 1.0),
    ("50", "<answer>50%</answer>", True, 1.0),
    ("-6", "<answer>-6</answer>", True, 1.0),
    ("-6", "It has \u22126 degrees.", True, 1.0),
    ("-6", "#### -$6", True, 1.0),
    ("6", "<answer>-6</answer>", False, 0.1),
    ("3", "8 - 5 = 3", True, 1.0),
    ("5", "7, or 12-5", True, 1.0),  # which is no minus five
    ("2.5", "<answer>2.50</answer>", True, 1.0),
    ("0.5", "#### .5", True, 1.0),
    ("18", "#### 18.", True, 1.0),
    ("18", "<answer>18.5</answer>", False, 0.1),
    ("0.5", "<answer>1/2</answer>", True, 0.1),
    ("18", "#### 36/2", True, 1.0),
    ("1.5", "It took 1 1/2 hours", True, 1.0),
    ("0.5", r"#### \frac{1}{2}", True, 1.0),
    ("1", "#### 1/0", False, 0.1),
    ("18", "First 3, then 18", True, 1.0),
    ("3", "First 3, then 18", False, 0.1),
    ("18", "<answer>9 + 9 = 18</answer>", True, 0.1),
    ("18", "<answer>18 or 19</answer>", False, 0.1),
    ("18", "<answer>18</answer><answer>19</answer>", True, 1.0),
    ("18", "<answer>19</answer> #### 18", False, 0.1),
    ("18", "#### 17 #### 18 and so on", True, 1.0),
    ("18", "#### 18\nQuestion: 19?", True, 1.0),
    ("18", "<answer>18", True, 1.0),  # a block that never ends is none
    ("18", r"so \boxed{18}", True, 1.0),
    ("18", r"<answer>\boxed{18}</answer>", True, 0.1),
    ("18", "", False, 0.0),
    ("18", "no idea", False, 0.0),
    ("18", "<answer></answer> 18", False, 0.0),
    ("18", "18 ####", False, 0.0),
    ("18", "<answer>eighteen</answer>", False, 0.1),
    ("95", "#### 9,5", False, 0.1),
    ("95", "<answer>9,5</answer>", False, 1.0),  # training drops every comma, dollar and percent
    ("123", "<answer>1,2,3</answer>", False, 1.0),
    ("18", "<answer>18.000,00</answer>", False, 1.0),
    ("18", "#### 18.000,00", False, 0.1),
    ("10", "<answer>1$0</answer>", False, 1.0),
    ("9", "#### 9,9", False, 0.1),
    ("5", "#### 5*5", False, 0.1),
    ("1080000", "#### 1,080,000.00", True, 1.0),
    ("18", "The answer is __18__.", True, 1.0),
    ("18", "The answer is _18_, in x_2 and v__3", True, 1.0),
    ("-18", "So **_-18_** it is", True, 1.0),
    ("1080", "#### _$1,080_", True, 1.0),
    ("18", r"18 of \text{CO}_2", True, 1.0),
    ("8", "The answer is 18 " + "a" * 196 + "m2", False, 0.1),
    ("18", "The answer is 18 " + "a" * 196 + "m2", True, 1.0),
    ("1.5", "It took 1 1/2 " + "a" * 193 + "m2", True, 1.0),
]


class TestFunctions:
    @pytest.mark.parametrize("gold, response, right, worth", EDGE_CASES)
    def test_edge_cases(self, gold, response, right, worth):
        row = {"question": "?", "answer": f"so\n#### {gold}"}
        assert (is_correct(row, response), reward(row, response)) == (right, worth)

    @pytest.mark.parametrize("gold, response, right, worth",
                             [case for case in EDGE_CASES if "</answer>" in case[1]])
    def test_a_block_is_worth_what_training_gives(self, gold, response, right, worth):
        assert gsm8k(response, problem_of(gold)).reward == worth

    def test_a_row_without_a_gold_answer_is_named(self):
        with pytest.raises(ValueError, match="'answer' must end in '#### <gold answer>'"):
            is_correct({"question": "?", "answer": "18"}, "18")

    @pytest.mark.parametrize("text", [
        *(piece * (10**6 // len(piece)) for piece in (
            "1", "1,", "1,000", "1/", "-", "a1", "<answer>", "####", "#### 1\n", "\\frac{1}{", "=",
            "{,}", " ", ".", "1 1/", "a1 ", "a" * 198 + " a1", "_", "_1")),
        "(" * 500_000 + "18" + ")" * 500_000, random.Random(0).randbytes(10**6).decode("latin-1"),
    ], ids=lambda text: repr(text[:8]))
    def test_no_response_takes_a_second(self, text):
        row, start = {"answer": "#### 18"}, time.process_time()
        for response in (text, f"<answer>{text}</answer>", f"#### {text}"):
            is_correct(row, response)
            reward(row, response)
        assert time.process_time() - start < 1


def problem_of(gold: str) -> Problem:
    return Problem(prompt="?", answer=gold, id="p0")


class TestPublishedFiles:
    @pytest.fixture
    def task(self, gsm8k_folder):
        return Gsm8kTask(data_path=gsm8k_folder)

    def test_have_their_known_size(self, task):
        assert (len(task.train), len(task.test)) == (7473, 1319)

    def test_every_gold_answer_is_a_number(self, task):
        for problem in task.train + task.test:
            float(normalize_number(problem.answer))

    def test_every_gold_answer_earns_the_full_reward_and_its_successor_does_not(self, task):
        for problem in task.train + task.test:
            assert gsm8k(f"<answer>${problem.answer}.00</answer>", problem) == (1.0, True)
            number = float(normalize_number(problem.answer))
            assert gsm8k(f"<answer>{number + 1}</answer>", problem) == (0.1, False)

    def test_every_gold_answer_scores_1_however_it_is_given(self, gsm8k_folder):
        for split in ("train", "test"):
            for line in (gsm8k_folder / f"{split}.jsonl").open():
                row = json.loads(line)
                gold = row["answer"].rpartition("####")[2].strip()
                for response in (f"<answer>{gold}</answer>", f"#### {gold}", row["answer"],
                                 f"The answer is {gold}."):
                    assert is_correct(row, response) and reward(row, response) == 1.0
                assert not is_correct(row, f"#### {gold}1")
