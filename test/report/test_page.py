from __future__ import annotations

import html.parser
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo.report.charts import CHARTS, PALETTE
from grpo.report.credentials import without_credentials
from grpo.report.curves import phase_seconds, svg, write_png_curves
from grpo.report.history import History, smooth, thin
from grpo.report.loggers import JsonlLogger, Sample
from grpo.report.page import flatten, pick_steps, write_report
from grpo.system.versions import versions

from .samples import sample

HOSTILE = "<script>alert('x')</script> & \"quoted\" \u202e \ud800 ```</pre>"


def metrics(step: int) -> dict[str, float]:
    values = {"reward/mean": 0.1 + 0.004 * step, "reward/std": 0.4, "policy/entropy": 1.0 / step,
              "policy/ratio_min": 0.5, "policy/ratio_p01": 0.9, "policy/ratio_p50": 1.0,
              "policy/ratio_p99": 1.1, "policy/ratio_max": 1.5, "time/step": 2.0,
              "time/generate": 1.2, "time/train": 0.5, "tokens/per_second": 1000.0 + step}
    return values | ({"eval/accuracy": step / 200} if step % 20 == 0 else {})


def record(run_dir: Path, rows: dict[int, dict], samples: dict[int, list[Sample]]) -> Path:
    with JsonlLogger(run_dir / "metrics.jsonl") as logger:
        for step, values in rows.items():
            logger.log(step, values)
        for step, some in samples.items():
            logger.log_samples(step, some)
    return run_dir


def charts_of(page: str) -> set[str]:
    return set(re.findall(r'<figure id="(\w+)">', page))


def has_color(path: Path, role: str) -> bool:
    from matplotlib.colors import to_rgb
    from matplotlib.image import imread

    off = np.abs(imread(path)[..., :3] - to_rgb(PALETTE[role][0])).max(-1)
    return bool((off < 0.01).any())


class Checker(html.parser.HTMLParser):
    """Collects what a page refers to, the tags it uses, and those left open."""

    VOID = {"meta", "path", "rect", "use", "br"}

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.references: list[str] = []
        self.open: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.references += [v for k, v in attrs if k in ("src", "href", "xlink:href", "srcset")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag


@pytest.fixture(scope="module")
def full_run(tmp_path_factory) -> Path:
    rows = {0: {"eval/accuracy": 0.1}} | {step: metrics(step) for step in range(1, 101)}
    steps = (1, 50, 100)
    three = {step: [sample(completion=f"at {step}"), sample(prompt=HOSTILE)] for step in steps}
    three[100].append(sample(prompt=f"only at the end {HOSTILE}", completion=HOSTILE))
    run_dir = record(tmp_path_factory.mktemp("run"), rows, three)
    config = {"seed": 42, "model": {"name": HOSTILE, "api_key": "do-not-print"}}
    write_report(run_dir, title=f"A run {HOSTILE}", config=config)
    return run_dir


@pytest.fixture(scope="module")
def full_page(full_run) -> str:
    return (full_run / "report.html").read_text(encoding="utf-8")


def test_page_is_one_well_formed_file_without_external_resources(full_page):
    page = Checker(full_page)
    assert page.open == []
    assert all(reference.startswith("#") for reference in page.references)
    assert not page.tags & {"script", "link", "img", "iframe"}
    assert not re.search(r"@import|url\((?!#)", full_page)


def test_parts_of_one_drawing_are_not_mistaken_for_those_of_another(full_page):
    used = set(re.findall(r'(?:url\(|href=")#([\w-]+)', full_page))
    assert used
    assert all(full_page.count(f' id="{name}"') == 1 for name in used)


def test_text_of_the_model_is_escaped_everywhere(full_page):
    assert "<script" not in full_page
    assert full_page.count("&lt;script&gt;") >= 4  # title, heading, prompt, configuration


def test_headline_gives_first_and_last_values(full_page):
    text = re.sub(r"<[^>]+>\n?", "", full_page)
    assert "10.0% → 50.0%" in text and "+40.0 points · best 50.0%" in text
    assert "0.122 → 0.482" in text  # means of steps 1-10 and 91-100
    assert "Steps100" in text and "3m 20s" in text and "1,051" in text


def test_charts_are_those_the_run_has_data_for(full_page):
    expected = {"accuracy", "reward", "reward_std", "ratio", "entropy", "step_time", "throughput"}
    assert charts_of(full_page) == expected


def test_curves_follow_the_theme_of_the_reader(full_page):
    drawings = "".join(re.findall(r"<svg.*?</svg>", full_page, re.S))
    assert not [role for role, (light, _) in PALETTE.items() if light in drawings]
    assert "var(--blue)" in drawings and "var(--ink)" in drawings
    assert "prefers-color-scheme: dark" in full_page


def test_completions_of_the_same_prompt_stand_side_by_side(full_page):
    cards = r'<div class="row">\s*<div class="card.*?(?=<div class="prompt">)'
    (first_row,) = re.findall(cards, full_page, re.S)[:1]
    assert re.findall(r"at \d+", first_row) == ["at 1", "at 50", "at 100"]
    assert "only at the end" not in full_page


def test_credentials_are_hidden(full_page):
    assert "do-not-print" not in full_page and "(hidden)" in full_page


def test_versions_are_those_installed(full_page):
    assert all(package in full_page and text in full_page for package, text in versions().items())


def test_png_curves_show_the_lines(full_run):
    assert has_color(full_run / "curves/reward.png", "blue")
    assert has_color(full_run / "curves/accuracy.png", "green")
    for role in ("blue", "green", "amber", "teal"):
        assert has_color(full_run / "curves/overview.png", role)


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write the page of a run, without its PNG files; its text."""
    monkeypatch.setattr("grpo.report.page.write_png_curves", lambda history, folder: [])
    return lambda rows, samples: write_report(
        record(tmp_path, rows, samples), title="t", config={}).read_text()


@pytest.mark.parametrize(("rows", "notice"), [
    ({}, "No step has been recorded."),
    ({1: {"loss/objective": math.nan}}, "Not finite in at least one step: loss/objective."),
    ({1: {"reward/errors": 2.0}, 2: {"reward/errors": 1.0}}, "3 completions got no reward"),
    ({1: {"tokens/truncated_fraction": 0.5}}, "50% of the completions of the last step"),
    ({1: {"reward/zero_variance_groups": 1.0, "reward/mean": 0.0, "reward/std": 0.0}},
     "Nothing to learn from: every completion got the reward 0 in the only iteration. Check")])
def test_what_a_reader_must_know_is_said(write, rows, notice):
    page = write(rows, {})
    assert notice in page
    assert Checker(page).open == []


def test_a_run_without_any_step_has_its_curve_files(tmp_path):
    write_png_curves(History(()), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "accuracy.png", "reward.png", "overview.png"}
    assert not has_color(tmp_path / "reward.png", "blue")


def test_one_step_draws_a_point_a_band_and_a_bar():
    history = History.from_rows([{"step": 20} | metrics(20)])
    drawn = {chart.name: svg(chart, history) for chart in CHARTS if chart.has_data(history)}
    assert "<use" in drawn["reward"] and "var(--blue)" in drawn["reward"]
    assert "var(--violet)" in drawn["step_time"] and "other  0.3s" in drawn["step_time"]
    assert "median  1" in drawn["ratio"]


def test_samples_with_different_prompts_and_failed_rewards(write):
    page = write({}, {
        1: [sample(prompt="first")],
        9: [sample(prompt="second", reward=math.nan, success=False), sample(truncated=True)]})
    assert "so each has its own" in page
    assert "advantage" not in page  # they are of evaluations
    assert "✗ none" in page and "cut by the length limit" in page
    assert page.count('class="card empty"') == 1
    assert "start <i>·</i> step 1" in page and "end <i>·</i> step 9" in page


def test_a_folder_without_a_run_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="metrics.jsonl"):
        write_report(tmp_path, title="t", config={})


def test_the_same_run_gives_the_same_drawing():
    history = History.from_rows([{"step": step} | metrics(step) for step in range(1, 50)])
    assert svg(CHARTS[0], history) == svg(CHARTS[0], history)


def test_rows_of_a_step_are_joined_and_later_values_win():
    rows = [{"step": 2, "a": 1.0}, {"step": 1, "a": 5.0}, {"step": 2, "a": 3.0, "b": None}]
    history = History.from_rows(json.loads(json.dumps(rows)))
    assert history.series("a") == ([1, 2], [5.0, 3.0])
    assert history.series("b") == ([], [])
    assert history.names == ["a", "b"]


def test_phases_fill_up_the_step():
    rows = [{"step": 0, "time": 1e9, "eval/accuracy": 0.1},
            {"step": 1, "time/step": 3.0, "time/train": 2.0},
            {"step": 2, "time/step": 1.0, "time/train": None, "time/eval": 0.5,
             "time/canary": 0.01}]
    steps, phases = phase_seconds(History.from_rows(rows))
    assert steps == [1, 2]
    # The evaluation is no part of its step, and the canary's hundredth could not be seen.
    assert phases == {"train": [2.0, 0.0], "eval": [0.0, 0.5], "other": [1.0, 1.0]}


numbers = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60)


@given(values=numbers, limit=st.integers(1, 30))
def test_thinning_keeps_bounds_order_and_length(values, limit):
    steps, kept = thin(range(len(values)), values, limit=limit)
    assert len(steps) == len(kept) == min(limit, len(values))
    assert steps == sorted(steps)
    slack = 1e-9 * max(map(abs, values))
    assert min(values) - slack <= min(kept) and max(kept) <= max(values) + slack


@given(values=numbers)
def test_smoothing_is_symmetric_and_stays_within_bounds(values):
    out = smooth(values)
    slack = 1e-6
    assert min(values) - slack <= min(out) and max(out) <= max(values) + slack
    assert smooth(values[::-1])[::-1] == pytest.approx(out, abs=1e-6)


@given(steps=st.lists(st.integers(0, 1000), max_size=20))
def test_picked_steps_are_logged_ones_with_both_ends(steps):
    picked = pick_steps(steps)
    assert len(picked) == min(3, len(set(steps))) and set(picked) <= set(steps)
    if steps:
        assert picked[0] == min(steps) and picked[-1] == max(steps)


def test_flatten_keeps_empty_groups_and_unset_credentials():
    config = {"a": {}, "wandb": {"api_key": None}, "tokenizer": "t", "x": {"auth_token": "s"},
              "tools": [{"judge_api_key": "s", "name": "n"}], "my.secret": "s"}
    assert flatten(without_credentials(config)) == {
        "a": {}, "wandb.api_key": None, "tokenizer": "t", "x.auth_token": "(hidden)",
        "tools": [{"judge_api_key": "(hidden)", "name": "n"}], "my.secret": "(hidden)"}
