"""The trainer's model computes what was trained: attention with its cap, layers without dropout."""

from __future__ import annotations

import pytest
import torch

from grpo.config.schema import ConfigError, load_config
from grpo.objectives.agreement import say_once
from grpo.run.build_model import load_model, switch_dropout_off

from ..config.configs import small
from ..objectives.causal_classes import make_class

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def gemma2(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gemma2")
    make_class("gemma2").save_pretrained(folder)
    return str(folder)


def load(folder, attention=None):
    config = load_config(small(train_model={"attn_implementation": attention}))
    return load_model(folder, config, device=CPU, dtype=torch.float32)


class TestAttentionThatCaps:
    def test_is_chosen_and_said(self, gemma2, caplog):
        say_once.cache_clear()
        model = load(gemma2)
        assert model.config._attn_implementation == "eager"
        assert "attn_implementation=eager is taken: Gemma2ForCausalLM caps" in caplog.text
        tokens = torch.arange(5, 20)[None]
        ours = model(input_ids=tokens).logits
        torch.testing.assert_close(ours, load(gemma2, "eager")(input_ids=tokens).logits)
        model.set_attn_implementation("sdpa")
        assert (model(input_ids=tokens).logits - ours).abs().max() > 0.01

    def test_is_not_another_that_was_asked_for(self, gemma2):
        with pytest.raises(ConfigError, match="train_model.attn_implementation=sdpa.*caps "
                                              "attention scores at 0.1.*'sdpa' does not; .*eager"):
            load(gemma2, "sdpa")

    def test_is_left_alone_where_nothing_is_capped(self, model_folder):
        assert load(str(model_folder)).config._attn_implementation == "sdpa"


@pytest.mark.parametrize("name", ["opt", "bart", "gpt2", "phi"])
def test_nothing_is_dropped_in_training(name):
    model = make_class(name).train()
    tokens = torch.arange(5, 20)[None]
    switch_dropout_off(model)
    first, second = (model(input_ids=tokens).logits for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(first, model.eval()(input_ids=tokens).logits)
