"""Recording what layers put out: one pass, no trace left, the same through a worker's methods."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from grpo.weights.worker.layer_outputs import LayerMethods, LayerRecorder

PROMPT = torch.tensor([[5, 6, 7, 8]])


class EngineLayer(nn.Module):
    """Returns its result and the residual apart, as vLLM's layers do."""

    def forward(self, positions, hidden, residual):
        residual = hidden if residual is None else hidden + residual
        return residual * 0.5, residual


class EngineModel(nn.Module):
    """A stand-in whose compiled form would pass the hooks by."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([EngineLayer(), EngineLayer()])
        self.norm = nn.Identity()
        self.do_not_compile = False
        self.ran_compiled: list[bool] = []

    def forward(self, tokens):
        self.ran_compiled.append(not self.do_not_compile)
        hidden, residual = tokens[:, None].float().expand(-1, 3), None
        for layer in self.layers:
            hidden, residual = layer(torch.arange(len(tokens)), hidden, residual)
        return self.norm(hidden + residual)


class Worker(LayerMethods):
    def __init__(self, model):
        self.model_runner = SimpleNamespace(get_model=lambda: model)


def hooks(model) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.mark.parametrize("position", [0, 3])
def test_the_outputs_are_the_hidden_states_of_the_position(tiny_model, position):
    with LayerRecorder(tiny_model, position=position) as recorder, torch.no_grad():
        tiny_model(input_ids=PROMPT)
    outputs = recorder.outputs
    assert hooks(tiny_model) == 0
    with torch.no_grad():
        states = tiny_model(input_ids=PROMPT, output_hidden_states=True).hidden_states
    assert list(outputs) == ["embed_tokens", "layers.0", "layers.1", "norm"]
    for name, state in zip(("embed_tokens", "layers.0", "norm"), states, strict=True):
        torch.testing.assert_close(outputs[name], state[0, position], rtol=0, atol=1e-12)


def test_only_the_first_pass_counts(tiny_model):
    with LayerRecorder(tiny_model, position=1) as recorder, torch.no_grad():
        tiny_model(input_ids=PROMPT)
        first = dict(recorder.outputs)
        tiny_model(input_ids=PROMPT + 1)
    assert all(torch.equal(recorder.outputs[name], first[name]) for name in first)


def test_residuals_are_added_and_the_model_runs_uncompiled_meanwhile():
    model = EngineModel()
    with LayerRecorder(model, position=1) as recorder:
        model(torch.tensor([2, 4]))
    assert {name: output.tolist() for name, output in recorder.outputs.items()} == {
        "embed_tokens": [4.0] * 3, "layers.0": [6.0] * 3, "layers.1": [9.0] * 3, "norm": [9.0] * 3}
    model(torch.tensor([2, 4]))
    assert model.ran_compiled == [False, True]
    assert hooks(model) == 0


def test_what_cannot_be_read_is_missing():
    model = EngineModel()
    with LayerRecorder(model, position=2) as recorder:
        model(torch.tensor([2, 4]))  # such as the rest of a prompt that was in the cache
    assert recorder.outputs == {}
    with LayerRecorder(nn.Linear(2, 2), position=0) as recorder:
        pass
    assert recorder.outputs == {}


def test_a_worker_records_one_pass_and_answers_in_json():
    model = EngineModel()
    worker = Worker(model)
    assert worker.layer_outputs() == {}
    worker.record_layers(0)
    worker.record_layers(1)  # the first was never asked for
    model(torch.tensor([2, 4]))
    answer = json.loads(json.dumps(worker.layer_outputs()))
    assert answer["layers.1"] == [9.0] * 3
    assert worker.layer_outputs() == {}
    assert hooks(model) == 0 and model.do_not_compile is False


def test_a_failing_pass_leaves_no_trace():
    model = EngineModel()
    with pytest.raises(RuntimeError), LayerRecorder(model, position=0):
        model(torch.zeros(2, 0, 5))
    assert hooks(model) == 0 and model.do_not_compile is False
