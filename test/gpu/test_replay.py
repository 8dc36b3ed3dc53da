"""On a GPU: a scorer that replays its model follows what happens to the model's weights."""

from __future__ import annotations

import copy

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
    """Whether a replay is as near to exact log-probs as the scorer's own pass.

    Bit for bit the two differ: see :class:`ReplayedScorer`. Weights that are not those of the
    moment are off by ten times as much as rounding is.
    """
    model = type(scorer.model)(scorer.model.config).cuda()  # in float32
    model.load_state_dict(scorer.model.state_dict())
    exact = TokenScorer(model.eval())(*inputs)[0]
    replay, own = ((scored(*inputs)[0] - exact).abs()[inputs[2]] for scored in (replayed, scorer))
    return bool(replay.mean() <= 2 * own.mean() + 1e-3 and replay.max() <= 3 * own.max() + 1e-3)


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


def test_a_scorer_that_packs_rows_is_recorded_too(model):
    scorer = TokenScorer(model, packing=True)
    assert scorer.shares_prompts
    replayed = ReplayedScorer(scorer)
    for number in range(3):
        assert agree(TokenScorer(model), replayed, batch(number))
    [recording] = replayed._recordings.values()
    assert recording is not None


def test_a_replay_of_old_weights_would_be_seen(model):
    scorer = TokenScorer(model)
    replayed = ReplayedScorer(TokenScorer(copy.deepcopy(model)))
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.05 * torch.randn_like(param))
    assert not agree(scorer, replayed, batch(0))


def test_compiled_layers_are_recorded_uncompiled_and_train_on(model):
    for layer in model.model.layers:
        layer.forward = torch.compile(layer.forward)
    scorer = TokenScorer(model)
    replayed = ReplayedScorer(scorer)
    for number in range(4):  # as in a run: train on long rows, check short ones
        tokens_BT, _, _ = batch(number, width=64)
        model(input_ids=tokens_BT, use_cache=False).logits.float().logsumexp(-1).mean().backward()
        assert agree(scorer, replayed, batch(number))
        with torch.no_grad():
            for param in model.parameters():
                param.sub_(1e-3 * param.grad)
                param.grad = None
        torch.cuda.synchronize()
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
