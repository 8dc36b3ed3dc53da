"""A frozen base whose linear layers are kept in 8 or 4 bits, beneath adapters that are trained.

torchao quantises: ``int8`` has a scale for each row, ``nf4`` 4-bit values of a normal distribution
in blocks of 64 whose scales are 8-bit themselves (Dettmers et al. 2023, arXiv:2305.14314). What is
computed is the product with the values *written out* in the model's dtype, so to the bit that of a
model that has these values as its weights. Engines are started from such a model
(:func:`write_base`): both sides are one policy, and the quantisation's error is in neither.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from grpo.config.model import Quantization
from grpo.envs.model_files import write_model
from grpo.weights.gather import TrainerRanks
from grpo.weights.layout import is_experts

#: Values that share a scale with nf4, and scales that share one of theirs.
_BLOCK, _BLOCK_OF_SCALES = 64, 256


class QuantisedLinear(nn.Linear):
    """A frozen linear layer in few bits.

    They are plain buffers, because tensors of torchao are written out when they move to another
    device. :attr:`weight` writes them out, for a layer's product and for its gradient alike.

    Args:
        linear: whose place it takes.
        quantised: its weight, as torchao's tensor.
    """

    def __init__(self, linear: nn.Linear, quantised: Tensor) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self._kind = type(quantised)
        names, self._details = quantised.__tensor_flatten__()
        for name in names:
            self.register_buffer(name, getattr(quantised, name))
        self.kept = tuple(names)

    @property
    def weight(self) -> Tensor:
        """``[out, in]`` in the dtype that was quantised: the values that the bits stand for."""
        return _written_out(self._kind.__tensor_unflatten__(
            {name: getattr(self, name) for name in self.kept}, self._details, None, None))

    def forward(self, x: Tensor) -> Tensor:
        return _Product.apply(x, self)


class _Product(torch.autograd.Function):
    """A product that keeps the bits for the backward pass, not the values written out."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: QuantisedLinear) -> Tensor:
        ctx.layer = layer
        return F.linear(x, layer.weight, layer.bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad @ ctx.layer.weight, None


@torch.no_grad()
def quantise_base(model: nn.Module, kind: Quantization, *, device: torch.device) -> nn.Module:
    """Quantise the linear layers of a model's decoder, in place, one after another on ``device``.

    They stay where they were, in fewer bytes; embeddings, norms and head keep their dtype.

    Raises:
        ModuleNotFoundError: if torchao is missing or too old.
        ValueError: for a mixture of experts, and for layers that cannot be quantised this way.
    """
    require_torchao()
    if any(is_experts(name, param) for name, param in model.named_parameters()):
        raise ValueError(f"train_model.quantization={kind}: the experts of a layer are one tensor "
                         "and no linear layers, so little would be saved; set it to null")
    for name, linear in [*_decoder_linears(model)]:
        weight = linear.weight.detach().to(device).contiguous()
        quantised = QuantisedLinear(linear, _quantise(weight, kind, name))
        if not quantised.weight.isfinite().all():
            raise ValueError(f"train_model.quantization={kind}: {name} has values that it cannot "
                             "keep; set it to null, or try the other kind")
        holder, _, last = name.rpartition(".")
        setattr(model.get_submodule(holder), last, quantised.to(linear.weight.device))
    return model


def quantised_layers(model: nn.Module) -> Iterator[tuple[str, QuantisedLinear]]:
    """Names and modules of a model's quantised layers."""
    return ((name, module) for name, module in model.named_modules()
            if isinstance(module, QuantisedLinear))


def quantised_bytes(kind: Quantization, *, out: int, width: int, itemsize: int) -> int:
    """Bytes of a ``[out, width]`` matrix whose values had ``itemsize`` bytes.

    Examples:
        >>> round(quantised_bytes("nf4", out=1536, width=8960, itemsize=2) / (1536 * 8960), 4)
        0.5157
    """
    if kind == "int8":
        return out * width + 5 * out  # a float32 scale for each row, and a zero point
    blocks = out * width // _BLOCK
    scales = blocks // math.gcd(blocks, _BLOCK_OF_SCALES)
    return out * width // 2 + blocks + (scales + 1 + 16) * itemsize  # mean of scales, and the codes


def write_base(model: nn.Module, tokenizer: Any, folder: Path) -> None:
    """Write the model that has the quantised layers' values as its weights, which engines serve and
    adapters fit; ``model`` says from then on that it came from there.

    The folder appears complete or not at all; one that is there already is replaced.
    """
    weights = TrainerRanks(model).whole_state(model)
    for name, layer in quantised_layers(model):
        for kept in layer.kept:
            del weights[f"{name}.{kept}"]
        weights[f"{name}.weight"] = layer.weight.to("cpu", copy=True)
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    write_model(model, partial, weights)
    tokenizer.save_pretrained(partial)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    model.config.name_or_path = str(folder)


def require_torchao() -> None:
    """Raise ModuleNotFoundError unless a torchao is installed that has both kinds."""
    try:
        from torchao.quantization import to_nf4  # noqa: F401
    except ImportError as error:
        raise ModuleNotFoundError("train_model.quantization needs the torchao package, of 0.18 or "
                                  f"later: pip install 'torchao>=0.18' ({error})") from error


def _decoder_linears(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Those of the layers, which alone have a number in their name."""
    return ((name, module) for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and any(map(str.isdigit, name.split("."))))


def _quantise(weight: Tensor, kind: Quantization, name: str) -> Tensor:
    """torchao's tensor of a matrix."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_, to_nf4

    if kind == "int8":
        holder = nn.Linear(*weight.shape[::-1], bias=False, device="meta")
        holder.weight = nn.Parameter(weight, requires_grad=False)
        quantize_(holder, Int8WeightOnlyConfig(set_inductor_config=False))
        return holder.weight
    if weight.numel() % _BLOCK:
        raise ValueError(f"train_model.quantization=nf4 takes {_BLOCK} values at a time, but "
                         f"{name} has {weight.numel()}; use int8")
    blocks = weight.numel() // _BLOCK
    return to_nf4(weight, _BLOCK, math.gcd(blocks, _BLOCK_OF_SCALES))


def _written_out(quantised: Tensor) -> Tensor:
    """The values that the bits stand for."""
    if hasattr(quantised, "get_original_weight"):  # nf4, whose `dequantize` is of single codes
        return quantised.get_original_weight()
    return quantised.dequantize()
