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
    ("preset=cispo loss_type=dapo", "preset=cispo and loss_type=dapo both say .*give one"),
    ("--config gsm8k_grpo.yaml preset=gspo --loss_type dapo", "preset=gspo and loss_type=dapo"),
    ("-m preset=grpo,gspo loss_type=dapo", "preset=grpo,gspo and loss_type=dapo both say"),
])
def test_what_the_objective_does_not_have_is_refused(line, message):
    with pytest.raises(ConfigError, match=message):
        with_trl_names(line.split())


def test_from_python_they_mean_the_same():
    config = compose(own_keys({"preset": "cispo", "epsilon_high": 5.0}))
    assert (config.train.objective, config.train.clip_epsilon) == ("cispo", CISPO)
    with pytest.raises(ConfigError, match="preset=cispo and loss_type=dapo both say"):
        own_keys({"preset": "cispo", "loss_type": "dapo"})


@pytest.mark.parametrize("swept", ["preset=dapo,sapo", "train.objective=ppo_clip,sapo"])
def test_a_sweep_of_the_objective_has_the_range_of_each(swept, words):
    found = with_trl_names(words(f"-m {RECIPE} {swept}"))
    keys = {text.partition("=")[0] for text in found}
    assert not keys & {"train.clip_epsilon", "train.objective_options"}
    assert ("train.aggregation" in keys) == swept.startswith("train.objective")
    assert [text for text in found if text.startswith("train.objective=")] == (
        [swept] if swept.startswith("train.objective") else [])


#: A recipe file whose objective has every kind of name.
WITH_OBJECTIVE = """env: gsm8k
max_steps: 3
preset: maxent_listwise
loss_type: dapo
scale_rewards: none
init_kl_coeff: 0.02
kl_target: 0.05
entropy_coef: 0.01
maxent_tau: 0.1
train: {clip_epsilon: [0.1, 0.1], seed: 5}
"""


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(WITH_OBJECTIVE)
    return ["--config", str(path)]


def test_a_preset_that_is_typed_takes_the_place_of_the_objective_of_the_file(recipe, capsys):
    train = composed_like([*recipe, "preset=gspo"]).train
    assert (train.objective, train.aggregation, train.clip_epsilon) == (
        "gspo", "sequence", (3e-4, 4e-4))
    assert (train.kl_to_ref_coeff, train.entropy_coeff, train.seed, train.max_steps) == (
        None, None, 5, 3)
    said = capsys.readouterr().out
    assert ("preset=gspo takes the place of what the file says of the objective: preset="
            "maxent_listwise loss_type=dapo scale_rewards=none init_kl_coeff=0.02 kl_target=0.05 "
            "entropy_coef=0.01 maxent_tau=0.1 train.clip_epsilon=[0.1,0.1]\n") in said
    # What is typed beside it counts.
    assert composed_like([*recipe, "preset=gspo", "--epsilon", "0.1"]).train.clip_epsilon == (
        0.1, 0.1)


def test_a_preset_that_is_swept_takes_its_place_as_well(recipe, capsys):
    found = with_trl_names(["-m", *recipe, "preset=grpo,gspo"])
    keys = {text.partition("=")[0] for text in found}
    assert not keys & {"train.objective", "train.aggregation", "train.clip_epsilon", "maxent.tau",
                       "train.advantage_estimator", "train.kl_to_ref_coeff"}
    assert [text for text in found if text.startswith("preset=")] == ["preset=grpo,gspo"]
    assert "preset=grpo,gspo takes the place" in capsys.readouterr().out


def test_none_takes_the_place_of_the_preset_of_the_file_alone(tmp_path, capsys):
    path = tmp_path / "recipe.yaml"
    path.write_text("preset: gspo\nloss_type: dapo\n")
    found = with_trl_names(["--config", str(path), "preset=none"])
    assert "preset=none" in found and "train.aggregation=token" in found
    assert "takes the place" not in capsys.readouterr().out
