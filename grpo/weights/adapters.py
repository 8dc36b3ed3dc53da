"""LoRA adapters on the trainer's model: making them, reading their factors, saving them.

An adapter adds ``scaling * B @ A`` to a linear module's matrix and leaves the matrix itself alone.
Source: Hu et al. 2021 (arXiv:2106.09685); the modules are those of the ``peft`` package.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from grpo import data
from grpo.objectives.scorer import TokenScorer
from grpo.policies.scoring import score_rollout
from grpo.policies.unpacked import ATTENTION_LINEARS
from grpo.weights.gather import TrainerRanks
from grpo.weights.layout import PEFT_PREFIX, is_experts
from grpo.weights.worker.lora import Factors, flat, nested

#: The linear modules of a decoder layer.
DECODER_LINEARS = (*ATTENTION_LINEARS, "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Adapter:
    """The factors of one module's adapter.

    Attributes:
        a: ``[rank, in]``; a parameter of the model, or a copy of it.
        b: ``[out, rank]``.
        scaling: factor of ``B @ A``, ``alpha / rank``.
    """

    a: Tensor
    b: Tensor
    scaling: float

    @property
    def shape(self) -> tuple[int, int, int]:
        """``(rank, in, out)``."""
        return (*self.a.shape, self.b.shape[0])

    def factors(self) -> Factors:
        """``lora_A`` and ``lora_B`` as they are trained."""
        return {"lora_A": self.a, "lora_B": self.b}

    def tensors(self) -> Factors:
        """``lora_A`` and ``lora_B`` with the scaling folded into B, as engines keep them."""
        b = self.b.detach()
        return {"lora_A": self.a.detach(), "lora_B": b if self.scaling == 1 else b * self.scaling}


def make_lora(
    model: nn.Module,
    *,
    r: int = 16,
    alpha: float = 32,
    dropout: float = 0.0,
    target_modules: Sequence[str] | None = None,
    layer_indices: Sequence[int] | None = None,
) -> nn.Module:
    """Put adapters into a model and freeze everything else.

    The model is changed in place and keeps its class and the memory of its parameters, which may be
    an engine's. Adapters have the dtype of the weights they sit on: an optimizer with float32
    masters loses nothing by it, and the engine can read the very same memory.

    Args:
        model: a Hugging Face causal language model without adapters.
        r: rank.
        alpha: the adapters' output is scaled by ``alpha / r``.
        dropout: on the adapters' input while the model trains. The engine has none, so any value
            above 0 makes trainer and engine disagree about the policy.
        target_modules: last parts of the names of linear modules; None: those of attention and
            feed-forward, of a mixture of experts those of attention.
        layer_indices: decoder layers that get adapters; None: all of them.

    Raises:
        ModuleNotFoundError: if peft is not installed.
        ValueError: for a value out of range, for a module or layer the model does not have, and for
            a model that already has adapters.

    Examples:
        >>> from transformers import Qwen2Config, Qwen2ForCausalLM
        >>> model = make_lora(Qwen2ForCausalLM(Qwen2Config(
        ...     vocab_size=11, hidden_size=8, intermediate_size=8, num_hidden_layers=2,
        ...     num_attention_heads=2, num_key_value_heads=1)),
        ...     r=2, target_modules=["q_proj"], layer_indices=[1])
        >>> [name for name, param in model.named_parameters() if param.requires_grad]
        ['model.layers.1.self_attn.q_proj.lora_A.default.weight', \
'model.layers.1.self_attn.q_proj.lora_B.default.weight']
    """
    require_peft()
    if isinstance(r, bool) or not isinstance(r, int) or r < 1:
        raise ValueError(f"r={r!r} must be a whole number of at least 1")
    if not alpha > 0:
        raise ValueError(f"alpha={alpha} must be positive: the adapters are scaled by alpha / r")
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout={dropout} must be at least 0 and below 1")
    if has_adapters(model):
        raise ValueError("the model already has LoRA adapters; load it without them")
    if target_modules is None:
        target_modules = ATTENTION_LINEARS if _has_experts(model) else DECODER_LINEARS
    _check_targets(model, target_modules, layer_indices)
    from peft import LoraConfig, inject_adapter_in_model

    return inject_adapter_in_model(LoraConfig(
        r=r, lora_alpha=alpha, lora_dropout=dropout, target_modules=list(target_modules),
        layers_to_transform=None if layer_indices is None else list(layer_indices),
        # Written with the adapter: what peft's AutoPeftModelForCausalLM loads it onto.
        task_type="CAUSAL_LM", base_model_name_or_path=model.config.name_or_path or None), model)


def require_peft() -> None:
    """Raise ModuleNotFoundError unless peft, which makes adapters, is installed."""
    if importlib.util.find_spec("peft") is None:
        raise ModuleNotFoundError("LoRA needs the peft package: pip install peft")


def _check_targets(
    model: nn.Module, target_modules: Sequence[str], layer_indices: Sequence[int] | None
) -> None:
    if isinstance(target_modules, str) or not target_modules:
        raise ValueError(f"target_modules={target_modules!r} must be a list of names, such as "
                         f"{list(DECODER_LINEARS[:2])}")
    linear = {name.rpartition(".")[2] for name, module in model.named_modules()
              if isinstance(module, nn.Linear) and ".layers." in f".{name}"}
    refused = sorted(set(target_modules) - set(ATTENTION_LINEARS))
    if refused and _has_experts(model):
        raise ValueError(f"train_model.lora.target_modules={refused} is not supported for "
                         "mixture-of-experts models: all experts of a layer are one tensor, on "
                         "which no adapter sits, and engines keep what is beside them apart; use "
                         f"{list(ATTENTION_LINEARS)}, which null means here")
    if unknown := sorted(set(target_modules) - linear):
        raise ValueError(f"target_modules: no decoder layer has a linear module called {unknown}; "
                         f"there are {sorted(linear)}")
    layers = model.config.get_text_config().num_hidden_layers
    if layer_indices is None:
        return
    if not layer_indices:
        raise ValueError("layer_indices=[] would leave nothing to train; None means all layers")
    if wrong := [i for i in layer_indices if not 0 <= i < layers]:
        raise ValueError(f"layer_indices: {wrong} are not among the model's layers 0 to "
                         f"{layers - 1}")


def _has_experts(model: nn.Module) -> bool:
    return any(is_experts(name, param) for name, param in model.named_parameters())


def has_adapters(model: nn.Module) -> bool:
    """Whether adapters sit on a model."""
    return any(".lora_" in name for name, _ in model.named_parameters())


def adapters(model: nn.Module) -> dict[str, Adapter]:
    """The adapters of a model, also of a ``PeftModel``, by the Hugging Face name of their module.

    Raises:
        ValueError: if there is none, or for kinds of adapters that are more than two factors.
    """
    found: dict[str, Adapter] = {}
    problems: list[str] = []
    for name, layer in _lora_layers(model):
        name = name.removeprefix(PEFT_PREFIX)
        active = [key for key in layer.active_adapters if key in layer.lora_A]
        if len(active) != 1:
            problems.append(f"{name}: {len(active)} active adapters with two factors")
        elif layer.merged or layer.lora_variant or layer.lora_bias[active[0]]:
            problems.append(f"{name}: merged, with a bias, or of another kind than plain LoRA")
        else:
            key = active[0]
            found[name] = Adapter(layer.lora_A[key].weight, layer.lora_B[key].weight,
                                  float(layer.scaling[key]))
    if problems:
        raise ValueError("an engine adds exactly one plain LoRA adapter to a linear module:\n  "
                         + "\n  ".join(problems))
    if not found:
        raise ValueError("the model has no LoRA adapters; make them with make_lora(model)")
    return found


def whole_adapters(model: nn.Module) -> dict[str, Adapter]:
    """:func:`adapters` with whole tensors, also of a model that FSDP2 has sharded.

    Every rank of such a model must call it. The values have the dtype of the weights beneath.
    """
    found = adapters(model)
    names = {id(param): name for name, param in model.named_parameters()}
    params = [param for adapter in found.values() for param in (adapter.a, adapter.b)]
    whole = TrainerRanks(model).whole((names[id(param)], param) for param in params)
    tensors = [tensor for _, tensor in whole]
    return {name: replace(adapter, a=a, b=b) for (name, adapter), a, b in
            zip(found.items(), tensors[::2], tensors[1::2], strict=True)}


def engine_factors(model: nn.Module) -> Factors:
    """``module.lora_A`` and ``module.lora_B`` as engines keep them; as :func:`whole_adapters`."""
    return flat({name: adapter.tensors() for name, adapter in whole_adapters(model).items()})


def _lora_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    if importlib.util.find_spec("peft") is None:
        return []
    from peft.tuners.lora import LoraLayer

    return [(name, module) for name, module in model.named_modules()
            if isinstance(module, LoraLayer)]


@contextmanager
def adapters_disabled(model: nn.Module) -> Iterator[nn.Module]:
    """Within the context the model computes what it did before it got adapters."""
    layers = [layer for _, layer in _lora_layers(model)]
    trained = [(param, param.requires_grad) for layer in layers for param in layer.parameters()]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield model
    finally:
        for layer in layers:
            layer.enable_adapters(True)
        for param, requires_grad in trained:  # peft switches gradients with the adapters
            param.requires_grad_(requires_grad)


class AdapterDisabledReference:
    """Write the log-probs of the reference policy: the trained model without its adapters.

    What :class:`~grpo.policies.scoring.ReferenceScorer` does with a second model, at no memory and
    with the same arguments; the model is neither frozen nor left in another mode.

    Raises:
        ValueError: if the model has no adapters, and would be its own reference.
    """

    def __init__(self, model: nn.Module, *, temperature: float, max_tokens: int,
                 fp32_head: bool = False) -> None:
        adapters(model)
        self.scorer = TokenScorer(model, temperature=temperature, fp32_head=fp32_head)
        self.max_tokens = max_tokens

    def __call__(self, rollout: TensorDictBase) -> TensorDictBase:
        with adapters_disabled(self.scorer.model):
            rollout[data.REF_LOG_PROBS], _ = score_rollout(self.scorer, rollout,
                                                           max_tokens=self.max_tokens)
        return rollout


def save_adapter(model: nn.Module, folder: str | Path,
                 gathered: dict[str, Adapter] | None = None) -> Path:
    """Write ``adapter_config.json`` and ``adapter_model.safetensors``, as peft and vLLM read them.

    The folder, whose absolute path is returned, appears complete or not at all; one that is there
    already is replaced. Of a sharded model, every rank calls this and rank 0 writes; or rank 0
    alone with what :func:`whole_adapters` has ``gathered`` on all.
    """
    from safetensors.torch import save_file

    found = whole_adapters(model) if gathered is None else gathered
    folder = Path(folder).absolute()
    if not TrainerRanks(model).leads:
        return folder
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    # Copies: the file format knows neither strides nor shared memory.
    tensors = {f"{PEFT_PREFIX}{name}.weight": torch.clone(
        param.detach(), memory_format=torch.contiguous_format)
        for name, param in flat({key: a.factors() for key, a in found.items()}).items()}
    save_file(tensors, partial / "adapter_model.safetensors", metadata={"format": "pt"})
    active = _lora_layers(model)[0][1].active_adapters[0]
    model.peft_config[active].save_pretrained(str(partial))
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    return folder


def load_adapter_tensors(folder: str | Path) -> dict[str, Factors]:
    """What :func:`save_adapter` wrote: module name to ``lora_A`` and ``lora_B``, not scaled."""
    from safetensors.torch import load_file

    return nested({name.removeprefix(PEFT_PREFIX).removesuffix(".weight"): tensor for name, tensor
                   in load_file(Path(folder) / "adapter_model.safetensors").items()})


@torch.no_grad()
def load_adapter(model: nn.Module, folder: str | Path) -> None:
    """Give a model's adapters the values that :func:`save_adapter` wrote, in place.

    Raises:
        ValueError: naming the modules that only one side has or whose shapes differ.
    """
    saved, ours = load_adapter_tensors(folder), adapters(model)
    wrong = sorted(saved.keys() ^ ours.keys()) or [
        name for name, adapter in ours.items()
        if (saved[name]["lora_A"].shape, saved[name]["lora_B"].shape)
        != (adapter.a.shape, adapter.b.shape)]
    if wrong:
        raise ValueError(f"{folder} holds another adapter than the model has: {len(wrong)} modules "
                         f"differ, the first is {wrong[0]}; use the r, target_modules and "
                         "layer_indices it was made with")
    for name, adapter in ours.items():
        adapter.a.copy_(saved[name]["lora_A"])
        adapter.b.copy_(saved[name]["lora_B"])
