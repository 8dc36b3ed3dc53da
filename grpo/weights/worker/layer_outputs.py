"""What each decoder layer puts out, to find the first one where engine and trainer part."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn


class LayerRecorder:
    """Context in which the next forward pass of Hugging Face's or vLLM's model leaves one vector of
    every layer.

    vLLM's compiled code would pass the hooks by, so the model runs uncompiled inside. What cannot
    be read at all, such as layers inside a CUDA graph, is missing from :attr:`outputs`.

    Args:
        model: a decoder whose layers are a ``ModuleList`` called ``layers``.
        position: which token's vectors are kept; counted over the tokens of the pass.

    Attributes:
        outputs: float64 ``[D]`` on the CPU by name, in order: ``embed_tokens`` (what the first
            layer reads), ``layers.0``, ``layers.1`` ..., ``norm``.

    Examples:
        >>> from transformers import Qwen2Config, Qwen2ForCausalLM
        >>> model = Qwen2ForCausalLM(Qwen2Config(
        ...     vocab_size=11, hidden_size=8, intermediate_size=8, num_hidden_layers=2,
        ...     num_attention_heads=2, num_key_value_heads=1))
        >>> with LayerRecorder(model, position=2) as recorder:
        ...     _ = model(input_ids=torch.tensor([[1, 2, 3]]))
        >>> list(recorder.outputs)
        ['embed_tokens', 'layers.0', 'layers.1', 'norm']
    """

    def __init__(self, model: nn.Module, *, position: int) -> None:
        self.model, self.position = model, position
        self.outputs: dict[str, Tensor] = {}
        self._undo = ExitStack()

    def __enter__(self) -> LayerRecorder:
        parent, layers = _decoder(self.model)
        if layers:  # a hook is a context, whose end removes it
            self._undo.enter_context(layers[0].register_forward_pre_hook(
                lambda _, args, kwargs: self._keep("embed_tokens", [*args, *kwargs.values()]),
                with_kwargs=True))
        named = [(f"layers.{number}", layer) for number, layer in enumerate(layers)]
        if isinstance(getattr(parent, "norm", None), nn.Module):
            named.append(("norm", parent.norm))
        for name, module in named:
            self._undo.enter_context(module.register_forward_hook(
                lambda _, args, output, name=name: self._keep(name, output)))
        for module in self.model.modules():
            if getattr(module, "do_not_compile", None) is False:
                self._undo.callback(setattr, module, "do_not_compile", False)
                module.do_not_compile = True
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def _keep(self, name: str, values: Any) -> None:
        values = values if isinstance(values, tuple | list) else [values]
        floats = [v for v in values if isinstance(v, Tensor) and v.is_floating_point()]
        if name in self.outputs or not floats:
            return
        state = floats[0].detach()
        # vLLM's layers return the residual beside what is to be added to it. Its norm has added it.
        if name.startswith("layers.") and len(floats) > 1 and floats[1].shape == state.shape:
            state = state + floats[1]
        rows = state.flatten(0, -2)
        if self.position < len(rows):
            self.outputs[name] = rows[self.position].to("cpu", torch.float64, copy=True)


class LayerMethods:
    """Methods a vLLM worker gets through ``worker_extension_cls``."""

    _layer_recorder: LayerRecorder | None = None

    def record_layers(self, position: int) -> None:
        """Record the next forward pass; see :class:`LayerRecorder`."""
        self.layer_outputs()
        self._layer_recorder = LayerRecorder(self.model_runner.get_model(), position=position)
        self._layer_recorder.__enter__()

    def layer_outputs(self) -> dict[str, list[float]]:
        """What was recorded since :meth:`record_layers`; ends the recording."""
        recorder, self._layer_recorder = self._layer_recorder, None
        if recorder is None:
            return {}
        recorder.__exit__()
        return {name: output.tolist() for name, output in recorder.outputs.items()}


def _decoder(model: nn.Module) -> tuple[nn.Module, nn.ModuleList]:
    """The module that has the decoder layers, and the layers; no layers if it has none."""
    for module in model.modules():
        layers = getattr(module, "layers", None)
        if isinstance(layers, nn.ModuleList):
            return module, layers
    return model, nn.ModuleList()
