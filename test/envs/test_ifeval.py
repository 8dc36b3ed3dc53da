"""Every instruction of IFEval, its rewards, and the task, on rows of the tests' own making and,
where present, on the real file."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import pytest

from grpo.envs.rewards.answers import verifier
from grpo.envs.tasks import ifeval, ifeval_checks, language, make_task

GERMAN = "Das ist ein kurzer Satz, der auf Deutsch geschrieben worden ist."
ENGLISH = "This is a short sentence that was written in plain English."

#: Instruction, its arguments, a response that follows it, and one that does not.
TABLE = [
    ("keywords:existence", {"keywords": ["cat", "a+b"]}, "A CAT wrote a+b.", "A cat wrote aab."),
    ("keywords:frequency", {"keyword": "tea", "frequency": 2, "relation": "at least"},
     "Tea, then tea.", "Tea alone."),
    ("keywords:frequency", {"keyword": "tea", "frequency": 2, "relation": "less than"},
     "Tea alone.", "Tea in a teapot."),
    ("keywords:forbidden_words", {"forbidden_words": ["tea"]}, "A teapot.", "Some TEA."),
    ("keywords:letter_frequency",
     {"letter": "q", "let_frequency": 2, "let_relation": "at least"}, "Quite quick.", "Quick."),
    ("keywords:letter_frequency",
     {"letter": "#", "let_frequency": 1, "let_relation": "less than"}, "none", "one #"),
    ("language:response_language", {"language": "de"}, GERMAN, ENGLISH),
    ("change_case:english_capital", {}, ENGLISH.upper(), ENGLISH),
    ("change_case:english_capital", {}, ENGLISH.upper(), GERMAN.upper()),
    ("change_case:english_lowercase", {}, ENGLISH.lower(), ENGLISH),
    ("change_case:capital_word_frequency",
     {"capital_frequency": 3, "capital_relation": "at least"}, "I AM. U.S.", "I am. U.S."),
    ("change_case:capital_word_frequency",
     {"capital_frequency": 2, "capital_relation": "less than"}, "WELL-KNOWN", "DON'T"),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "at least"},
     "It is late. Go home!", "Mr. Smith paid $3.50, e.g. for tea"),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "less than"},
     "Dr. Smith left.", "He left. Why?"),
    ("length_constraints:number_words", {"num_words": 3, "relation": "at least"},
     "one, two - three", "one, two"),
    ("length_constraints:number_words", {"num_words": 3, "relation": "less than"},
     "one two", "it's two"),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2},
     "one\n***\ntwo\n***", "one\n***\n\n***\ntwo"),
    ("length_constraints:nth_paragraph_first_word",
     {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "then"},
     "First.\n\n'Then, we go.", "First.\n\nAnd then."),
    ("detectable_content:number_placeholders", {"num_placeholders": 2},
     "[name] of [place]", "[name] of [\nplace]"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Bye.\np. s. so", "Bye. PS"),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "P.P.S. so", "P.S. so"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n  - b", "* a\n** b"),
    ("detectable_format:constrained_response", {}, "My answer is yes.", "Yes."),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2},
     "*one* and *two*", "*one* and **"),
    ("detectable_format:multiple_sections", {"section_spliter": "Day", "num_sections": 2},
     "Day 1\na\nDay 2\nb", "Day one, Day 2"),
    ("detectable_format:json_format", {}, '```json\n{"a": [1]}\n```', "{a: 1}"),
    ("detectable_format:title", {}, "<<Joy>>\ntext", "<< >>\n<<\n>>"),
    ("combination:two_responses", {}, "a\n******\nb", "a\n******\na"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say it."}, "say it.\nIt.", "It. Say it."),
    ("startend:end_checker", {"end_phrase": "Is that all?"}, '"So. is that all?"', "All? Yes."),
    ("startend:quotation", {}, ' "so" ', '"so'),
    ("punctuation:no_comma", {}, "one and two", "one, two"),
]


def row_of(*instructions) -> dict:
    return {"key": 1, "prompt": "Write.", "instruction_id_list": [name for name, _ in instructions],
            "kwargs": [arguments for _, arguments in instructions]}


@pytest.mark.parametrize("name, arguments, follows, violates", TABLE)
def test_an_instruction_is_followed_or_not(name, arguments, follows, violates):
    row = row_of((name, arguments | {"unused": None}))
    assert ifeval.score(row, follows) == {"prompt_strict": True, "inst_strict": [True],
                                          "prompt_loose": True, "inst_loose": [True]}
    assert ifeval.score(row, violates)["inst_strict"] == [False]


def test_the_table_has_all_25():
    assert {name for name, *_ in TABLE} == set(ifeval_checks.CHECKS)
    assert len(ifeval_checks.CHECKS) == 25


def test_the_loose_rule_leaves_out_what_frames_a_response():
    row = row_of(("startend:quotation", {}), ("punctuation:no_comma", {}))
    for framed in ('Sure:\n"so"', '"so"\nBye', 'Sure:\n"so"\nBye', '**"so"**', 'A:\n*"so"*\nB'):
        assert ifeval.score(row, framed) == {
            "prompt_strict": False, "inst_strict": [False, True],
            "prompt_loose": True, "inst_loose": [True, True]}
    assert not ifeval.score(row, 'Sure:\n\n"so"\nBye\nBye')["prompt_loose"]
    for nothing in ("", " \n", "*"):
        assert ifeval.score(row, nothing)["inst_loose"] == [False, nothing == "*"]


@pytest.mark.parametrize("response, expected", [
    ("<think>a</think><answer>fine</answer>", 1.15),
    ("<answer>fine</answer>", 1.1),
    ("<answer>fine</answer><answer>, </answer>", 1.0),  # the first block counts
    ("<think>a</think><think>b</think><answer>fine</answer>", 1.1),
    ("<answer>, \nfine</answer>", 0.4),  # loosely followed
    ("<answer>, </answer>", 0.1), ("<think>a</think>fine", 0.05), ("fine", 0.0),
    ("<answer>fine", 0.0)])
def test_the_reward_weighs_scores_and_format(response, expected):
    assert ifeval.reward(row_of(("punctuation:no_comma", {})), response) == expected


def test_half_of_the_instructions_count_half_in_two_of_the_weights():
    row = row_of(("punctuation:no_comma", {}), ("startend:quotation", {}))
    assert ifeval.reward(row, "<answer>fine</answer>") == pytest.approx(0.1 + 0.15 + 0.05)


@pytest.mark.parametrize("row, message", [
    (row_of(("keywords:rhyme", {})), "'keywords:rhyme', which is no instruction of IFEval"),
    (row_of(("startend:end_checker", {})), "must be end_phrase, got none"),
    (row_of(("startend:quotation", {"depth": 2})), "must be empty, got depth"),
    (row_of(), "needs at least one instruction"),
    (row_of(("keywords:frequency", {"keyword": "a", "frequency": 1, "relation": "exactly"})),
     "'exactly' must be 'at least' or 'less than'")])
def test_what_is_not_of_ifeval_is_named(row, message):
    with pytest.raises(ValueError, match=message):
        ifeval.score(row, "text")


def test_languages_are_told_the_same_each_time():
    row = row_of(("language:response_language", {"language": "de"}))
    texts = [f"{GERMAN} {ENGLISH} {number}" for number in range(20)]
    first = [ifeval.score(row, text)["prompt_strict"] for text in texts]
    language._detected.cache_clear()
    assert [ifeval.score(row, text)["prompt_strict"] for text in texts] == first


# Of a megabyte: repetitions on which a careless expression tries every split, nesting, and bytes.
HOSTILE = [piece * (10**6 // len(piece)) for piece in (
    "x", " ", "\n", "!", "[", "*", "<", "{", '"', "9", "[a", "* ", " *** ", "U. ", "Mr. ", "p. ",
    "SECTION ", "*U. Aa,\n", " \n*", "<answer>", "<think></think>", '{"a":')]
HOSTILE += ["[" * 500_000 + "]" * 500_000,
            random.Random(0).randbytes(10**6).decode("latin-1")]


@pytest.mark.slow
@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: repr(text[:8]))
def test_no_response_takes_a_second(text):
    ifeval.warm_up()
    for name, arguments, *_ in TABLE:
        for judge, response in ((ifeval.score, text), (ifeval.reward, f"<answer>{text}</answer>")):
            start = time.process_time()
            judge(row_of((name, arguments)), response)
            assert time.process_time() - start < 1, name


# -- the task -------------------------------------------------------------------------------------


def written(folder: Path, rows: list[dict]) -> Path:
    path = folder / "input_data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows_of(count: int) -> list[dict]:
    return [row_of(("punctuation:no_comma", {})) | {"key": key, "prompt": f"Write {key}."}
            for key in range(count)]


def test_splits_are_disjoint_and_do_not_depend_on_the_number_of_training_problems(tmp_path):
    path = written(tmp_path, rows_of(40))
    task = make_task("ifeval", data_path=str(path), num_test=10)
    again = make_task("ifeval", data_path=str(tmp_path), num_test=10, num_train=5)
    assert (len(task.train), len(task.test), len(again.train)) == (30, 10, 5)
    assert again.test == task.test and again.train == task.train[:5]
    assert not {p.id for p in task.train} & {p.id for p in task.test}
    assert make_task("ifeval", data_path=str(path), num_test=10, seed=1).test != task.test


def test_problems_ask_and_verify(tmp_path):
    task = make_task("ifeval", data_path=str(written(tmp_path, rows_of(3))), num_test=1)
    problem = task.split("test")[0]
    assert [message["role"] for message in problem.prompt] == ["system", "user"]
    assert task.default_reward == "verifier"
    assert verifier("<answer>fine</answer>", problem) == (1.1, True)
    assert verifier("<answer>a, b</answer>", problem) == (0.1, False)


@pytest.mark.parametrize("rows, options, error, message", [
    ([], {"data_path": "nowhere"}, FileNotFoundError, "there is no nowhere"),
    (rows_of(3), {"num_test": 4}, ValueError, "there are only 3 rows"),
    (rows_of(3), {"dataset": "mine"}, ValueError, "dataset='mine' would be ignored"),
    ([{"key": 1}], {}, ValueError, "line 1: 'prompt' must be str"),
    ([rows_of(1)[0] | {"kwargs": []}], {}, ValueError, "line 1: .* 1 entries and kwargs 0")])
def test_data_that_cannot_be_used_is_named(tmp_path, rows, options, error, message):
    path = str(written(tmp_path, rows))
    with pytest.raises(error, match=message):
        make_task("ifeval", **{"data_path": path, "num_test": 0} | options)


@pytest.mark.slow
def test_all_rows_of_the_real_data_are_problems_and_every_one_can_be_failed(ifeval_file):
    task = make_task("ifeval", data_path=str(ifeval_file))
    assert (len(task.train), len(task.test)) == (441, 100)
    rows = [json.loads(line) for line in ifeval_file.open()]
    assert {name for row in rows for name in row["instruction_id_list"]} == set(
        ifeval_checks.CHECKS)
    assert not any(ifeval.score(row, " ")["prompt_loose"] for row in rows)
