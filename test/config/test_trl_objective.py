"""Names of TRL's loss beside ``preset`` and ``train.objective``, which say what they mean."""

from __future__ import annotations

import pytest

from grpo.config.keys import ConfigError
from grpo.run.api import compose, own_keys
from grpo.run.cli.trl_names import with_trl_names

from .configs import composed_like

#: A recipe file that leaves the objective open.
RECIPE = "--config RECIPE"
CISPO, SAPO = (1.0, 4.0), {"temperature_positive": 1.0, "temperature_negative": 1.2}


@pytest.fixture
def words(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("env: gsm8k\nmax_steps: 3\n")
    return lambda line: line.replace("RECIPE", str(path)).split()


@pytest.mark.parametrize("line, keys", [
    ("preset=cispo epsilon_high=5.0", {"objective": "cispo", "clip_epsilon": CISPO}),
    ("train.objective=cispo epsilon_high=5.0", {"objective": "cispo", "clip_epsilon": CISPO}),
    ("preset=scalerl epsilon_high=5.0", {"aggregation": "prompt", "clip_epsilon": CISPO}),
    (f"{RECIPE} preset=cispo epsilon_high=5.0", {"objective": "cispo", "clip_epsilon": CISPO}),
    (f"{RECIPE} train.objective=cispo epsilon_high=5.0", {"clip_epsilon": CISPO}),
    (f"{RECIPE} train.objective=cispo", {"objective": "cispo", "clip_epsilon": None}),
    (f"{RECIPE} train.objective=gspo", {"objective": "gspo", "clip_epsilon": (0.2, 0.2)}),
    (f"{RECIPE} train.objective=sapo", {"objective": "sapo", "clip_epsilon": None}),
    (f"{RECIPE} train.objective=cispo epsilon_high=0.3 train.clip_epsilon=[1.0,4.0]",
     {"clip_epsilon": CISPO}),
    (f"{RECIPE} loss_type=grpo train.objective=sapo", {"objective": "sapo", "clip_epsilon": None}),
    ("preset=sapo sapo_temperature_neg=1.2", {"objective": "sapo", "objective_options": SAPO}),
    ("train.objective=sapo sapo_temperature_neg=1.2", {"objective_options": SAPO}),
    ("preset=sapo epsilon=0.1", {"objective": "sapo", "clip_epsilon": None}),
    ("preset=cispo loss_type=dapo epsilon_high=0.28", {"objective": "ppo_clip", "clip_epsilon":
                                                       (0.2, 0.28)}),
    ("preset=dapo delta=3", {"objective_options": {"delta": 3.0}, "clip_epsilon": (0.2, 0.28)}),
    ("preset=dapo importance_sampling_level=sequence", {"objective": "gspo"}),
    ("preset=gspo importance_sampling_level=token epsilon=0.2", {"objective": "ppo_clip"}),
    ("preset=gspo importance_sampling_level=sequence", {"objective": "gspo", "clip_epsilon":
                                                        (3e-4, 4e-4)}),
    ("preset=cispo importance_sampling_level=token", {"objective": "cispo"}),
])
def test_names_mean_what_they_mean_for_the_objective(line, keys, words):
    train = composed_like(words(line)).train
    assert {key: getattr(train, key) for key in keys} == keys


@pytest.mark.parametrize("line, message", [
    ("preset=cispo epsilon_high=0.28", "train.objective=cispo epsilon_high=0.28: .*above 1"),
    ("preset=cispo importance_sampling_level=sequence", "sequence with train.objective=cispo"),
    ("preset=gspo delta=3", "train.objective=gspo does not have"),
    ("-m preset=cispo,dapo epsilon_high=5.0", "epsilon_high=5.0: .*depends on preset, which has "
     "several values in this sweep; write train.clip_epsilon"),
    ("-m train.objective=sapo,cispo sapo_temperature_neg=1.2", "write train.objective_options"),
])
def test_what_the_objective_does_not_have_is_refused(line, message):
    with pytest.raises(ConfigError, match=message):
        with_trl_names(line.split())


def test_from_python_they_mean_the_same():
    config = compose(own_keys({"preset": "cispo", "epsilon_high": 5.0}))
    assert (config.train.objective, config.train.clip_epsilon) == ("cispo", CISPO)


@pytest.mark.parametrize("swept", ["preset=dapo,sapo", "train.objective=ppo_clip,sapo"])
def test_a_sweep_of_the_objective_has_the_range_of_each(swept, words):
    found = with_trl_names(words(f"-m {RECIPE} {swept}"))
    keys = {text.partition("=")[0] for text in found}
    assert not keys & {"train.clip_epsilon", "train.objective_options"}
    assert ("train.aggregation" in keys) == swept.startswith("train.objective")
    assert [text for text in found if text.startswith("train.objective=")] == (
        [swept] if swept.startswith("train.objective") else [])
