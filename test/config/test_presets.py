"""Presets: each composes with every run and is, once built, what its name says."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hydra.errors import MissingConfigException
from omegaconf import DictConfig, OmegaConf

from grpo import data
from grpo.config.presets import describe_preset, leaves
from grpo.config.schema import ConfigError, load_config
from grpo.objectives import GroupAdvantage, total_loss
from grpo.objectives.maxent import MaxEntWeights
from grpo.run.build_objective import build_advantage, build_loss

from . import configs
from .configs import FOLDER, composed_like

RUNS = sorted(path.stem for path in FOLDER.glob("*.yaml")
              if not {"async", "offline"} & {*path.stem.split("_")})
NAMES = sorted(path.stem for path in (FOLDER / "preset").glob("*.yaml"))
composed = functools.cache(configs.composed)


def plain(values: DictConfig) -> dict[str, Any]:
    return dict(leaves(OmegaConf.to_container(values)))


def own_keys(name: str) -> dict[str, Any]:
    return plain(OmegaConf.load(FOLDER / "preset" / f"{name}.yaml"))


# What is built: objective, its range, aggregation, KL in the loss, and the estimator of advantages
# (or tau).
EXPECTED = {
    "cispo": ("cispo", (1.0, 0.2), "token", None, "group_norm"),
    "dapo": ("ppo_clip", (0.2, 0.28), "token", None, "group_norm"),
    "dppo": ("dppo", None, "token", None, "group_norm"),
    "dr_grpo": ("ppo_clip", (0.2, 0.2), "dr_grpo", None, "group_mean"),
    "grpo": ("ppo_clip", (0.2, 0.2), "sequence", 0.04, "group_norm"),
    "gspo": ("gspo", (3e-4, 4e-4), "sequence", None, "group_norm"),
    "maxent_listwise": ("maxent_listwise", None, "prompt", None, 0.05),
    "maxent_weighted": ("maxent_weighted", None, "prompt", None, 0.5),
    "maxrl": ("reinforce", None, "token", None, "maxrl"),
    "none": ("ppo_clip", (0.2, 0.2), "token", None, "group_norm"),
    "reinforce_pp": ("ppo_clip", (0.2, 0.2), "token", None, "global_norm"),
    "rloo": ("reinforce", None, "dr_grpo", None, "rloo"),
    "sapo": ("sapo", None, "sequence", None, "group_norm"),
    "scalerl": ("cispo", (1.0, 4.0), "prompt", None, "batch_norm"),
}


def test_every_file_is_a_preset_whose_meaning_is_tested():
    assert set(NAMES) == set(EXPECTED)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("name", NAMES)
def test_a_preset_changes_the_keys_it_names_and_no_other(run, name):
    without, values = plain(composed(run)), plain(composed(run, f"preset={name}"))
    own = own_keys(name)
    assert all(values[key] == value for key, value in own.items())
    assert {key for key in values | without if values.get(key) != without.get(key)} <= set(own)
    assert values.keys() == without.keys()
    load_config(composed(run, f"preset={name}"))


def built(*overrides: str, model):
    config = load_config(composed("grpo", *overrides))
    return build_loss(config, model, SimpleNamespace(pad_token_id=0)), build_advantage(config)


@pytest.mark.parametrize("name", NAMES)
def test_what_a_preset_builds_is_what_it_says(name, tiny_model):
    loss, advantage = built(f"preset={name}", model=tiny_model)
    objective, clip_epsilon, aggregation, kl, estimator = EXPECTED[name]
    assert loss.terms.objective.name == objective
    assert loss.clip_epsilon == clip_epsilon
    assert loss.aggregation == aggregation
    assert loss.terms.kl_to_ref_coeff == kl
    if objective.startswith("maxent"):
        assert isinstance(advantage, MaxEntWeights) and advantage.tau == estimator
    else:
        assert isinstance(advantage, GroupAdvantage) and advantage.estimator == estimator


def test_what_single_presets_add(tiny_model):
    dapo = load_config(composed("grpo", "preset=dapo", "inference_model.max_tokens=10"))
    assert dapo.train.max_sampling_rounds == 10
    advantage = build_advantage(dapo)
    assert (advantage.overlong_buffer, advantage.max_response_tokens) == (2, 10)
    _, advantage = built("preset=reinforce_pp", model=tiny_model)
    assert (advantage.kl_in_reward_coeff, advantage.kl_in_reward_estimator) == (0.001, "k1")
    loss, advantage = built("preset=scalerl", model=tiny_model)
    assert advantage.zero_variance_filter
    loss, _ = built("preset=dr_grpo", model=tiny_model)
    assert loss.constant_length == 4  # the longest response of this run
    loss, _ = built("preset=grpo", model=tiny_model)
    assert loss.terms.kl_estimator == "k3"


def gradient(name: str, make_model, make_batch) -> torch.Tensor:
    """Of one batch a little off its policy, with advantages from its own rewards."""
    model = make_model()
    loss, advantage = built(f"preset={name}", model=model)
    batch = make_batch(model, prompts=(2, 4, 1, 3), responses=(4, 1, 3, 2))
    batch[data.REWARD] = torch.tensor([[1.0], [0.2], [0.0], [0.7]])
    del batch[data.ADVANTAGE]
    total_loss(loss(advantage(batch))).backward()
    return torch.cat([param.grad.flatten() for param in model.parameters()])


def test_every_preset_has_a_gradient_of_its_own(make_model, make_batch):
    # On rewards that are neither equal nor yes or no, and with several ratios outside each range.
    gradients = {name: gradient(name, make_model, make_batch) for name in NAMES}
    for name, one in gradients.items():
        assert one.isfinite().all() and one.norm() > 0, name
        for other in NAMES:
            if other != name:
                assert not torch.allclose(one, gradients[other], rtol=1e-3), (name, other)


@pytest.mark.parametrize(("name", "override", "expected"), [
    ("gspo", "train.clip_epsilon=[0.1,0.2]", {"train.clip_epsilon": [0.1, 0.2]}),
    ("dapo", "train.max_sampling_rounds=null", {"train.max_sampling_rounds": None}),
    ("maxent_listwise", "maxent.tau=2", {"maxent.tau": 2}),
])
def test_a_key_on_the_command_line_wins(name, override, expected):
    for overrides in ([f"preset={name}", override], [override, f"preset={name}"]):
        values = plain(composed("grpo", *overrides))
        assert all(values[key] == value for key, value in (own_keys(name) | expected).items())


def test_a_preset_is_described_with_what_was_changed():
    values = composed("grpo", "preset=dapo", "train.clip_epsilon=[0.2,0.3]",
                      "train.overlong_buffer=null")
    assert describe_preset("dapo", values, config_folder=FOLDER) == (
        "dapo: train.objective=ppo_clip, train.clip_epsilon=[0.2, 0.3] (not [0.2, 0.28]), "
        "train.aggregation=token, train.advantage_estimator=group_norm, "
        "train.max_sampling_rounds=10, train.overlong_buffer=None (not 0.2)")
    assert describe_preset("maxent_weighted", composed("grpo", "preset=maxent_weighted"),
                           config_folder=FOLDER).endswith("maxent.tau=0.5")
    assert describe_preset("none", composed("grpo"), config_folder=FOLDER) == "none: sets nothing"


@pytest.mark.parametrize("script", ["grpo.py", "grpo-async.py"])
@pytest.mark.parametrize("name", NAMES)
def test_what_a_preset_sets_and_atropos_environments_do_themselves_is_left_out(name, script):
    given = ["env=atropos", "env.url=http://127.0.0.1:8000", f"preset={name}"]
    config = composed_like(given, script=script)
    assert config.train.max_sampling_rounds is None and config.train.overlong_buffer is None


@pytest.mark.parametrize("typed", ["max_sampling_rounds=10", "overlong_buffer=0.2"])
def test_with_atropos_environments_they_are_refused_where_they_are_typed(typed):
    with pytest.raises(ConfigError, match=rf"train.{typed} is not read with env=atropos"):
        composed_like(["env=atropos", "env.url=http://127.0.0.1:8000", "preset=dapo",
                       f"train.{typed}"])


def test_what_is_left_out_of_a_preset_is_in_the_line_that_describes_it():
    values = composed("grpo", "env=atropos", "env.url=http://127.0.0.1:8000", "preset=dapo")
    assert describe_preset("dapo", values, config_folder=FOLDER).endswith(
        "train.max_sampling_rounds=None (not 10), train.overlong_buffer=None (not 0.2)")


def test_an_unknown_preset_is_an_error_that_lists_the_known_ones():
    with pytest.raises(MissingConfigException) as error:
        composed("grpo", "preset=nonsense")
    assert "preset/nonsense" in str(error.value)
    assert all(name in str(error.value) for name in NAMES)
