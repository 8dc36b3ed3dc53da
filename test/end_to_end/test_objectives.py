"""Presets and controllers in whole runs, put together by ``grpo.py`` itself in this process."""

from __future__ import annotations

import math

import pytest

from grpo.report.loggers import read_jsonl


def zero(completion: str, problem) -> float:
    return 0.0


@pytest.fixture
def fit(train, tmp_path):
    """Run the trainer; metrics of each iteration."""

    def run(*overrides: str) -> list[dict]:
        train("run", "train.total_dialog_turns=48", "optimizer.lr=1e-3", *overrides)
        assert (tmp_path / "run" / "final_model" / "config.json").exists()
        rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
        assert [row["step"] for row in rows] == [0, 1, 2, 3]
        for row in rows[1:]:
            assert {"reward/mean", "loss/objective", "policy/entropy", "policy/ratio_p50",
                    "policy/ess", "canary/max_abs_diff", "train/grad_norm", *ALWAYS} <= row.keys()
            assert all(math.isfinite(value) for value in row.values())
        assert rows[1]["train/grad_norm"] > 0
        return rows[1:]

    return run


def names(rows: list[dict], *prefixes: str) -> set[str]:
    """Metrics with one of the prefixes, the same in each iteration, beside those of every run."""
    found = [{name for name in row if name.startswith(prefixes)} for row in rows]
    assert all(one == found[0] for one in found)
    return found[0] - ALWAYS


ALWAYS = {"loss/total", "advantage/positive_rows", "advantage/negative_rows",
          "advantage/zero_fraction"}
RARE = ("control/", "sampling/", "advantage/", "reward/shaped", "reward/rows", "policy/mismatch",
        "policy/kl_to_ref", "loss/")


def test_gspo(fit):
    rows = fit("preset=gspo", "train.optim_batch_size=8")
    assert names(rows, *RARE) == {"loss/objective"}
    # Its range is close enough to clip sequences in the second step.
    assert sum(row["policy/clip_fraction_low"] + row["policy/clip_fraction_high"]
               for row in rows) > 0


def test_dapo_samples_dynamically_and_punishes_length(fit):
    rows = fit("preset=dapo", "train.max_sampling_rounds=3")
    assert names(rows, *RARE) == {"loss/objective", "reward/shaped_mean", "sampling/rounds",
                                  "sampling/informative_fraction", "sampling/reward_mean"}
    for row in rows:
        assert 1 <= row["sampling/rounds"] <= 3
        assert row["sampling/informative_fraction"] > 0
        # Random answers run into the limit, where the punishment is complete.
        assert row["reward/shaped_mean"] < row["reward/mean"] - 0.5


@pytest.mark.parametrize("preset, tau", [("maxent_listwise", 0.05), ("maxent_weighted", 0.5)])
def test_maxent_with_a_reference_and_a_temperature_that_follows(fit, preset, tau):
    rows = fit(f"preset={preset}", "maxent.beta=0.1", "maxent.tau_target=1.2",
               "train.optim_batch_size=8", "train.gradient_accumulation_steps=2")
    assert names(rows, *RARE) == {"loss/objective", "control/tau", "advantage/weight_entropy",
                                  "policy/kl_to_ref"}
    assert rows[0]["control/tau"] == tau
    assert len({row["control/tau"] for row in rows}) == 3
    assert all(0 < row["advantage/weight_entropy"] <= math.log(4) for row in rows)
    assert all("time/reference" in row for row in rows)


def test_reinforce_pp_adapts_the_kl_in_the_reward(fit):
    rows = fit("preset=reinforce_pp", "kl_controller.kind=horizon", "kl_controller.target=0.001",
               "kl_controller.horizon=5", "train.entropy_coeff=0.01",
               "entropy_controller.target=9", "entropy_controller.step=0.01",
               "entropy_controller.maximum=0.1")
    assert names(rows, *RARE) == {"loss/objective", "loss/entropy", "policy/kl_to_ref",
                                  "reward/shaped_mean", "control/kl_to_ref_coeff",
                                  "control/entropy_coeff"}
    assert rows[0]["control/kl_to_ref_coeff"] == 0.001
    assert rows[1]["control/kl_to_ref_coeff"] == pytest.approx(0.001 * (1 - 0.2 / 5))
    assert [row["control/entropy_coeff"] for row in rows] == pytest.approx([0.01, 0.02, 0.03])


def test_corrections_of_several_steps_to_a_scored_policy(fit):
    rows = fit("train.proximal=scored", "train.mismatch={tis: 2.0, geometric_reject: [0.5, 2.0]}",
               "train.optim_batch_size=8", "train.off_policy_delta=0.1",
               "train.entropy_top_fraction=0.5", "train.kl_to_inference_coeff=0.01",
               "train.zero_variance_filter=true", "train.advantage_clip_percentile=5")
    assert names(rows, "policy/mismatch") != set()
    assert {"loss/kl_to_inference", "policy/off_policy_fraction", "reward/rows_in_loss",
            "time/proximal"} <= rows[0].keys()


def test_a_teacher_alone_trains_where_rewards_are_equal(fit, model_folder):
    rows = fit(f"env.reward='{__name__}:zero'", f"distill.teacher={model_folder}",
               "distill.topk_coeff=1", "distill.topk=5", "distill.temperature=0.5",
               "distill.reverse_kl_coeff=0.5")
    assert names(rows, *RARE) == {"loss/objective", "loss/distill"}
    assert all(row["reward/zero_variance_groups"] == 1 and "time/teacher" in row for row in rows)
