"""On a GPU: a scorer that replays its model follows what happens to the model's weights."""

from __future__ import annotations

import pytest
import torch

from grpo.objectives import TokenScorer
from grpo.weights.replay import ReplayedScorer

pytestmark = pytest.mark.gpu


@pytest.fixture
def model(gpu_folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(gpu_folder, dtype=torch.bfloat16).cuda().eval()


def batch(seed: int, *, width: int = 40) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    tokens_BT = torch.randint(5, 250, (4, width), device="cuda")
    mask_BT = torch.zeros_like(tokens_BT, dtype=torch.bool)
    mask_BT[:, -3:] = True
    return tokens_BT, torch.ones_like(mask_BT), mask_BT


@torch.no_grad()
def agree(scorer: TokenScorer, replayed: ReplayedScorer, inputs) -> bool:
    return torch.allclose(replayed(*inputs)[0], scorer(*inputs)[0], atol=1e-2)


def test_replays_follow_updates_in_place(model):
    scorer = TokenScorer(model)
    replayed = ReplayedScorer(scorer)
    for number in range(6):
        assert agree(scorer, replayed, batch(number))
        with torch.no_grad():
            for param in model.parameters():
                param.add_(0.05 * torch.randn_like(param))
    [recording] = replayed._recordings.values()
    assert recording is not None


def test_a_parameter_that_moves_is_read_where_it_is_now(model):
    scorer = TokenScorer(model)
    replayed = ReplayedScorer(scorer)
    for number in range(3):
        assert agree(scorer, replayed, batch(number))
    for param in model.parameters():
        param.data = 1.5 * param.data  # elsewhere, and different
    assert agree(scorer, replayed, batch(9))


def test_padding_and_other_shapes_are_computed_as_ever(model):
    scorer = TokenScorer(model)
    replayed = ReplayedScorer(scorer)
    tokens_BT, attention_BT, mask_BT = batch(0)
    attention_BT = attention_BT.clone()
    attention_BT[0, -1] = mask_BT[0, -1] = False
    for number in range(3):
        assert agree(scorer, replayed, batch(number, width=24 + number))
        assert agree(scorer, replayed, (tokens_BT, attention_BT, mask_BT))


def test_a_model_that_waits_for_the_gpu_is_not_recorded(model):
    layer = model.model.layers[0]
    forward = layer.forward

    def waits(states, *args, **kwargs):
        assert states.sum().isfinite().item()
        return forward(states, *args, **kwargs)

    layer.forward = waits
    scorer = TokenScorer(model)
    replayed = ReplayedScorer(scorer)
    for number in range(4):
        assert agree(scorer, replayed, batch(number))  # draws random numbers on the GPU
    assert not replayed._possible


def test_an_architecture_that_is_not_known_is_not_recorded(model):
    model.config.model_type = "qwen2_moe"
    assert not ReplayedScorer(TokenScorer(model))._possible
