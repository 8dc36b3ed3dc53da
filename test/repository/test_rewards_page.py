"""docs/rewards.md: its commands run, and its tables are what the code has."""

from __future__ import annotations

import json
import re
import shlex
import threading

import pytest

from grpo.config.env import EnvConfig
from grpo.config.schema import load_config
from grpo.envs.rewards import get_reward, reward_names
from grpo.envs.rewards.registry import options_of
from grpo.training.rollout_metrics import _FAULTS

from ..config.configs import composed
from ..envs.test_judge import StandIn
from ..support import (
    BENCHMARKS,
    REPO,
    blocks,
    code_in,
    commands,
    environment,
    several_runs,
    table_rows,
)

GUIDE = (REPO / "docs" / "rewards.md").read_text()
SCRIPT = "python sota-implementations/grpo/grpo.py"
LINES = commands(GUIDE)
SMALLER = ["model.warm_start_steps=5", "env.num_envs=2", "env.repeats=2", "env.task.num_test=8",
           "inference_model.max_tokens=4", "train.total_dialog_turns=8",
           "train.checkpoint_frequency=0", "inference_model.backend=transformers"]


def test_every_command_is_a_configuration_that_works():
    assert len(LINES) > 4
    for line in LINES:
        assert line.startswith(SCRIPT)
        assert load_config(composed("grpo", *shlex.split(line)[2:])).env != EnvConfig()


@pytest.mark.slow
def test_commands_run(tmp_path, cache):
    (source,) = [block for block in blocks("python", GUIDE) if "def brevity" in block]
    (tmp_path / "my_rewards.py").write_text(source)
    with StandIn() as judge:
        threading.Thread(target=judge.serve_forever, daemon=True).start()
        runs = [[*shlex.split(line.replace("http://127.0.0.1:8000/v1", judge.url))[1:], *SMALLER]
                for line in LINES]
        for run in runs:
            run[0] = str(REPO / run[0])
        outputs = several_runs(runs, tmp_path, environment(cache, PYTHONPATH=str(tmp_path)))
        judge.shutdown()
    text = "".join(outputs)
    assert text.count("held-out accuracy") == len(runs)
    assert "got no reward" not in text and len(judge.asked) > 8


def test_the_table_has_every_reward_with_its_options():
    rows = table_rows(GUIDE, "Built in")
    table = {name.strip("`"): code_in(options) for name, _, options in rows}
    ours = [name for name in reward_names() if get_reward(name).__module__.startswith("grpo.envs.r")
            and not get_reward(name).__module__.endswith("registry")]
    assert set(table) == set(ours)
    for name, said in table.items():
        options = options_of(get_reward(name))
        if name == "judge":  # what must be given, and its prompt, stand in the text
            assert {"url", "model", "prompt"} <= set(code_in(GUIDE.partition("## A judge")[2]))
            options = {key: value for key, value in options.items()
                       if key not in ("url", "model", "prompt")}
        assert eval(f"dict({', '.join(said)})") == options, name


def test_metrics_and_keys_are_those_of_the_code():
    counted = set(re.findall(r"`reward/(\w+)`", GUIDE)) - {"errors"}
    assert counted == set(_FAULTS)
    for key, value in re.findall(r"`env\.(reward_\w+)` \(([\d.]+)\)", GUIDE):
        assert EnvConfig.model_fields[key].default == float(value), key
    for key in set(re.findall(r"`env\.(\w+)", GUIDE)):
        assert key in EnvConfig.model_fields, key


def test_the_benchmark_shows_what_the_pages_say():
    result = json.loads((BENCHMARKS / "results" / "rewards_cpu.json").read_text())
    rates = [value for name, value in result["gsm8k"].items() if name != "rows"]
    costs = [one["cost"] for name, one in result["slow"].items() if name != "at once"]
    assert result["complete"] and min(rates) > 10_000 and len(costs) == 3 and max(costs) < 1.05
    page = (BENCHMARKS / "README.md").read_text().partition("## Rewards")[2]
    assert all(f"{rate:,}" in page for rate in rates) and all(f"{cost}" in page for cost in costs)
    assert f"{min(costs):.2f} to {max(costs):.2f}" in GUIDE
