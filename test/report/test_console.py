from __future__ import annotations

import io
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console as RichConsole

from grpo.report.console import Console
from grpo.report.words import format_duration, one_line, phase_times

from .samples import sample

METRICS = {"reward/mean": 0.5, "eval/accuracy": 0.25, "tokens/per_second": 12_345.0,
           "time/step": 6.0, "time/generate": 4.0, "time/train": 1.5, "time/canary": 0.01}
any_text = st.text(st.characters(exclude_categories=()))


def plain(*, width: int = 80, encoding: str = "utf-8", **options) -> RichConsole:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True)
    return RichConsole(file=stream, width=width, **{"force_terminal": False, **options})


def written(out: RichConsole) -> str:
    return out.file.buffer.getvalue().decode(out.encoding)


def test_without_a_terminal_each_step_is_one_plain_line():
    out = plain()
    with Console(12, console=out) as console:
        console._clock = iter([0.0, 10.0]).__next__
        console.update(1, {"reward/mean": 0.25})
        console.update(2, METRICS)
    first, second = written(out).splitlines()
    assert first == "step  1/12  reward 0.250"
    assert second == ("step  2/12  reward 0.500 ▲0.250  held-out 25.0%  12,345 tok/s  "
                      "step time 6.0s (generate 4.0s · train 1.5s)  left 1m 40s")


@pytest.mark.parametrize(("encoding", "up", "down"), [("utf-8", "▲", "▼"), ("ascii", "+", "-")])
def test_the_banner_explains_the_changes_beside_reward_and_accuracy(encoding, up, down):
    out = plain(width=400, encoding=encoding)
    rewards = [float(i % 7) for i in range(23)]
    with Console(23, console=out) as console:
        console.banner({"model": "tiny"})
        for step, reward in enumerate(rewards, start=1):
            console.update(step, {"reward/mean": reward})
    assert (f"{up} {down} beside the reward: mean of the last 5 iterations less that of the first "
            "5; beside held-out: points since the first evaluation") in written(out)
    change = (sum(rewards[-5:]) - sum(rewards[:5])) / 5
    assert f" {down if change < 0 else up}{abs(change):.3f}" in written(out).splitlines()[-1]


def test_a_line_has_the_accuracy_of_its_own_step_compared_with_that_before_training():
    out = plain()
    with Console(2, console=out) as console:
        console.update(0, {"eval/accuracy": 0.125})
        console.update(1, {"reward/mean": 0.25})
        console.update(2, {"reward/mean": 0.25, "eval/accuracy": 0.25})
    before, without, after = written(out).splitlines()
    assert before == "step 0/2  held-out 12.5%" and "held-out" not in without
    assert "held-out 25.0% ▲12.5" in after




@settings(max_examples=40, deadline=None)
@given(text=any_text, encoding=st.sampled_from(["utf-8", "ascii", "latin-1"]))
def test_no_text_of_the_model_reaches_a_log_as_a_control_character(text, encoding):
    out = plain(encoding=encoding)
    with Console(1, console=out) as console:
        console.samples_table([sample(prompt=text, completion=text, answer=text)], step=1)
        console.banner({"model": text})
        console.update(1, METRICS)
    assert all(c.isprintable() or c == "\n" for c in written(out))


@settings(max_examples=20, deadline=None)
@given(text=any_text)
def test_no_message_can_raise_for_lack_of_an_encoding(text):
    with Console(1, console=plain(encoding="ascii")) as console:
        console.info(text)
        console.warn(text)
        console.finish({"run": Path("ö")}, text)


def test_markup_in_model_text_is_shown_as_it_is():
    out = plain()
    Console(1, console=out).samples_table([sample(completion="[bold]x[/bold] [/oops]")], step=1)
    assert "[bold]x[/bold] [/oops]" in written(out)


def test_samples_table_shows_newlines_marks_and_the_cut():
    out = plain(width=100)
    right, wrong = sample(completion="It is\n4"), sample(success=False, reward=0.1, truncated=True)
    Console(1, console=out).samples_table([right, wrong, wrong, wrong, right], step=7)
    text = written(out)
    assert "samples at step 7" in text
    assert "It is⏎4" in text
    assert text.count("✓ 1.00") == 1 and text.count("✗ 0.10") == 3  # four at most
    assert text.count("length") == 3


@pytest.mark.parametrize("width", [80, 100, 160])
def test_tables_and_banner_stay_within_the_width(width):
    out = plain(width=width)
    console = Console(1, console=out)
    console.banner({"model": "m" * 300})
    console.samples_table([sample(prompt="long " * 100, completion="x" * 500, answer="9" * 90)],
                          step=1)
    assert max(map(len, written(out).splitlines())) <= width
    assert written(out).count("…") == 3  # one cut in each column, none in the banner


def test_ascii_outputs_get_ascii_signs():
    out = plain(encoding="ascii")
    with Console(2, console=out) as console:
        console.samples_table([sample(success=False)], step=1)
        console.update(1, METRICS | {"reward/mean": 0.9})
        console.update(2, METRICS)
    text = written(out)
    assert text.isascii() and "no 1.00" in text and "-0.400" in text


def test_terminal_is_redrawn_and_fits_eighty_columns():
    out = plain(force_terminal=True, color_system="standard", _environ={"TERM": "xterm"})
    with Console(200, console=out) as console:
        for step in range(1, 40):
            console.update(step, METRICS | {"reward/mean": step / 40, "eval/accuracy": step / 40})
        lines = out.render_lines(console._render(), pad=False)
    bar, learning, times = ("".join(segment.text for segment in line) for line in lines)
    assert bar.startswith("step  39/200 ━")
    assert "reward 0.975 ▲0.850 ▁▁▂" in learning and learning.endswith("12,345 tok/s")
    assert times.startswith("step time 6.0s  generate 4.0s")
    assert max(len(bar), len(learning), len(times)) <= 80
    assert "\x1b[2K" in written(out)


def test_dumb_terminal_gets_plain_lines():
    out = plain(force_terminal=True, _environ={"TERM": "dumb"})
    with Console(1, console=out) as console:
        console.update(1, METRICS)
    assert written(out).startswith("step 1/1  reward 0.500") and "\x1b" not in written(out)


def test_time_left_follows_the_recent_pace():
    out = plain()
    with Console(100, console=out) as console:
        console._clock = iter([0.0, 50.0, *(50.0 + 2.0 * i for i in range(1, 30))]).__next__
        for step in range(1, 31):
            console.update(step, {})
    assert written(out).splitlines()[-1].endswith("left 2m 20s")  # 70 steps of 2 s


def test_a_nan_reward_is_shown_and_does_not_poison_the_trend():
    out = plain()
    with Console(4, console=out) as console:
        for step, reward in enumerate([0.0, math.nan, 0.5], start=1):
            console.update(step, {"reward/mean": reward})
    _, nan_line, last = written(out).splitlines()
    assert "reward nan" in nan_line
    assert "reward 0.500 ▲0.500" in last


def test_finish_says_where_everything_lies_in_one_piece():
    out = plain(width=40)
    path = Path("outputs") / ("a-rather-long-run-name" * 4) / "report.html"
    with Console(1, console=out) as console:
        console.finish({"run": Path("outputs"), "report": path}, "held-out 12.0% -> 41.2%")
    head, run, report = written(out).splitlines()
    assert head == "✓ held-out 12.0% -> 41.2%"
    assert run.split() == ["run", "outputs"]
    assert report.split() == ["report", str(path)]


def test_a_run_that_ended_early_gets_no_tick():
    out = plain()
    with Console(4, console=out) as console:
        console.finish({"run": Path("outputs")}, "out of memory after 2 of 4", tick=False)
    assert written(out).startswith("✗ out of memory after 2 of 4\n")


def test_a_run_without_steps_is_refused():
    with pytest.raises(ValueError, match="total_steps=0 must be at least 1"):
        Console(0)


@given(text=any_text, limit=st.integers(3, 60))
def test_one_line_keeps_head_and_tail_within_the_limit(text, limit):
    line = one_line(text, limit=limit)
    assert len(line) <= limit and line.isprintable()
    if len(text.strip()) > limit and text.isprintable():
        head, tail = line.split("…", 1) if "…" not in text else (line[:1], line[-1:])
        assert text.strip().startswith(head) and text.strip().endswith(tail)


@given(seconds=st.floats(0, 1e7))
def test_durations_are_short_and_never_say_sixty(seconds):
    said = format_duration(seconds)
    assert len(said) <= 8
    assert not {"60s", "60.0s", "60m", "24h"} & set(said.split())


def test_phase_times_leave_out_the_total_and_nan():
    assert phase_times(METRICS | {"time/sync": math.nan}) == {
        "generate": 4.0, "train": 1.5, "canary": 0.01}
