"""Why engine and trainer disagree: which tensors differ, from which layer on, and what that means.

Only runs once the canary has failed, so it may cost some forward passes. Tensors are compared
exactly, layer outputs up to rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import nan
from typing import TYPE_CHECKING, TypeGuard

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from grpo import data
from grpo.objectives.scorer import TokenScorer
from grpo.policies.base import Policy
from grpo.policies.handle import EngineHandle, InProcessEngine
from grpo.policies.inprocess import engine_module
from grpo.policies.server import ServerPolicy
from grpo.policies.transformers import TransformersPolicy
from grpo.policies.vllm import VLLMPolicy
from grpo.weights.layout import FUSED
from grpo.weights.shared import some_names
from grpo.weights.tolerance import CanaryReport
from grpo.weights.worker.layer_outputs import LayerRecorder

if TYPE_CHECKING:
    from grpo.weights.canary import Canary

#: Relative difference that rounding explains, by dtype; attention sums in another order than the
#: trainer's, and half precision adds a few thousandths in each layer.
LAYER_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-5, torch.float16: 0.05,
                   torch.bfloat16: 0.1}
#: Attention kernels of GPUs multiply float32 in reduced precision.
CUDA_FLOAT32_LAYER_TOLERANCE = 1e-2
# Share of the parameters up to which "these and no others" is more likely than "all of them": in
# half precision a missed update leaves many equal.
_A_FEW = 0.1
# Relative difference up to which two models are one at different times, not two.
_SAME_MODEL = 0.5
# Tokens of the prompt whose layer outputs are compared, so that it is not processed in pieces.
_PROBE_TOKENS = 64
# Seconds for a question to an engine's worker.
_RPC_TIMEOUT = 60.0


@dataclass(frozen=True)
class Diagnosis:
    """What was found.

    Attributes:
        tensors: names of parameters whose values differ.
        layer: first output that differs, such as ``layers.7``, if any does.
        layer_difference: relative difference there, or the greatest one.
        layers_read: whether layer outputs could be read, of the engine's worker and of a trainer
            that has its model to itself.
        cause: the likely one.
        fix: what to do about it.
    """

    tensors: list[str]
    layer: str | None
    layer_difference: float
    layers_read: bool
    cause: str
    fix: str

    def __str__(self) -> str:
        found = (f"these parameters differ: {some_groups(self.tensors)}" if self.tensors else
                 "all synchronised parameters are equal")
        if not self.layers_read:
            layer = "layer outputs could not be compared"
        elif self.layer is None:
            layer = f"all layer outputs agree within {self.layer_difference:.1e} of their norm"
        else:
            layer = (f"the first layer output that differs is that of {self.layer}, by "
                     f"{self.layer_difference:.1e} of its norm")
        return f"{found}; {layer}. Likely cause: {self.cause}. Fix: {self.fix}"


def diagnose(canary: Canary) -> Diagnosis:
    """Find out what a failed canary's two sides do not have in common.

    A trainer of several ranks answers fewer questions: it has no model that runs on one of them.
    """
    tensors = canary.weights.differing()
    layer, difference, was_read = _first_difference(canary)
    cause, fix = (_cause_of_tensors(canary, tensors, layer, difference) if tensors else
                  _cause_beside_tensors(canary, layer))
    return Diagnosis(tensors, layer, difference, was_read, cause, fix)


def some_groups(names: list[str]) -> str:
    """The first names, each with its part of the engine's fused tensor, and how many more."""
    return some_names([*map(with_group, names)])


def with_group(name: str) -> str:
    """A parameter's name, and where the engine keeps it if that is in a fused tensor.

    Examples:
        >>> with_group("model.layers.7.self_attn.k_proj.weight")
        'model.layers.7.self_attn.k_proj.weight (k part of qkv_proj)'
    """
    modules = name.split(".")
    for fused, parts in FUSED.items():
        for part in parts:
            if part in modules:
                return f"{name} ({part.removesuffix('_proj')} part of {fused})"
    return name


def _cause_of_tensors(
    canary: Canary, tensors: list[str], layer: str | None, difference: float
) -> tuple[str, str]:
    trained = sum(p.requires_grad for p in canary.scorer.model.parameters())
    if len(tensors) < _A_FEW * trained:
        return ("an update that reached the other tensors but not these; their storage was "
                "replaced on one side, or something else wrote to them",
                "write into parameters in place, and look for what loads or modifies these alone")
    if layer is not None and difference > _SAME_MODEL:
        return ("the engine serves another model, or another checkpoint of it",
                "start the engine from the model that the trainer was loaded from")
    if not _is_whole(canary.scorer):
        return ("a missed update, or an engine that serves another model than the trainer was "
                "loaded from",
                "call publish() after every optimizer step, see that it did not fail, and start "
                "the engine from the trainer's model")
    return ("a missed update: the engine has older weights than the trainer",
            "call publish() after every optimizer step, and see that it did not fail")


def _cause_beside_tensors(canary: Canary, layer: str | None) -> tuple[str, str]:
    if canary.agrees(canary.compare(_unseen(canary))):
        return ("a stale prefix cache: prompts that the engine has not seen before agree, so it "
                "reuses keys and values which older weights computed",
                "reset the engine's caches after every update, as publish() does, and check the "
                "answer: False means that it was refused")
    if layer is not None:
        return (f"the engine computes {layer} differently from equal tensors: another attention "
                "implementation, other rotary tables, another routing to experts or order of them "
                "(docs/models.md), an adapter on one side only, or memory that is no longer that "
                "of the tensors compared",
                "compare the configurations of both models, and restart the engine")
    temperature = _fitting_temperature(canary)
    if temperature is not None:
        return (f"another temperature: the engine's log-probs are those of {temperature:.2f}, the "
                f"trainer scores at {canary.scorer.temperature:g}",
                "use one temperature for policy and scorer, and start the engine with "
                "logprobs_mode=processed_logprobs")
    return ("what comes after the layers: the output head, the processing of logits, another "
            "temperature, or CUDA graphs that read memory which was replaced",
            "compare the configurations of both models, and restart the engine")


def _is_whole(scorer: object) -> TypeGuard[TokenScorer]:
    """Whether a scorer has a model that this process can run alone."""
    return isinstance(scorer, TokenScorer)


def _unseen(canary: Canary) -> TensorDict:
    """The canary's prompts with another first token each time, so that nothing cached fits them."""
    prompts = canary.prompts.clone()
    vocabulary = canary.scorer.model.get_input_embeddings().num_embeddings
    prompts[data.PROMPT_TOKENS][:, 0].add_(canary.failures).remainder_(vocabulary)
    return prompts


@torch.no_grad()
def _fitting_temperature(canary: Canary) -> float | None:
    """The temperature at which the trainer would agree with the engine, if there is one."""
    scorer = canary.scorer
    if not _is_whole(scorer):
        return None
    batch = canary.sample(canary.prompts)
    mask_BT = batch[data.ASSISTANT_MASK]
    predictions = scorer.predict(batch[data.TOKENS], batch[data.ATTENTION_MASK], mask_BT)

    def at(temperature: float) -> CanaryReport:
        log_probs_N, _ = scorer.score(predictions, temperature=temperature)
        return CanaryReport.of(log_probs_N - batch[data.LOG_PROBS][mask_BT])

    best, step, count = 1.5, 0.05, 29
    while step > 1e-7:
        tried = [best + step * i for i in range(-count, count + 1)]
        best = min((t for t in tried if t > 0), key=lambda t: at(t).mean_abs_diff)
        step, count = step / 10, 10
    return best if canary.agrees(at(best)) else None



def _first_difference(canary: Canary) -> tuple[str | None, float, bool]:
    """Name of the first output that differs, how far it does, and whether any could be read."""
    if not _is_whole(canary.scorer):
        return None, 0.0, False
    model, prompts = canary.scorer.model, _unseen(canary)
    longest = int(prompts[data.PROMPT_MASK].sum(-1).argmax())
    prompt = prompts[data.PROMPT_TOKENS][longest][prompts[data.PROMPT_MASK][longest]]
    prompt = prompt[:_PROBE_TOKENS].tolist()
    ours, theirs = trainer_outputs(model, prompt), engine_outputs(canary.policy, prompt)
    param = next(model.parameters())
    limit = (CUDA_FLOAT32_LAYER_TOLERANCE if param.is_cuda and param.dtype == torch.float32 else
             LAYER_TOLERANCE[param.dtype])
    both = [name for name in ours if name in theirs and ours[name].shape == theirs[name].shape]
    greatest = 0.0
    for name in both:
        difference = ((ours[name] - theirs[name]).norm() / ours[name].norm()).item()
        if not difference <= limit:  # NaN differs
            return name, difference, True
        greatest = max(greatest, difference)
    return None, greatest, bool(both)


@torch.no_grad()
def trainer_outputs(model: nn.Module, prompt: list[int]) -> dict[str, Tensor]:
    """What each layer of a Hugging Face model puts out for the last token of a prompt."""
    with LayerRecorder(model, position=len(prompt) - 1) as recorder:
        model(input_ids=torch.tensor([prompt], device=next(model.parameters()).device))
    return recorder.outputs


def engine_outputs(policy: Policy, prompt: list[int]) -> dict[str, Tensor]:
    """What each layer puts out in the engine that a policy generates with; empty if unreadable.

    The engine must have no cached keys and values of the prompt's token ids.
    """
    model, engine = _inside(policy)
    generate = policy.with_sampling(max_tokens=1).generate_from_ids
    position = len(prompt) - 1
    if model is not None:
        with LayerRecorder(model, position=position) as recorder:
            generate([prompt])
        return recorder.outputs
    if engine is None:
        return {}
    engine.collective_rpc("record_layers", position, timeout=_RPC_TIMEOUT)
    generate([prompt])
    recorded = engine.collective_rpc("layer_outputs", timeout=_RPC_TIMEOUT)[0]
    # JSON has no NaN.
    return {name: torch.tensor([nan if value is None else value for value in output],
                               dtype=torch.float64) for name, output in recorded.items()}


def _inside(policy: Policy) -> tuple[nn.Module | None, EngineHandle | None]:
    """The module that generates if it is in this process, else the engine that has it."""
    if isinstance(policy, TransformersPolicy):
        return policy.model, None
    if isinstance(policy, ServerPolicy):
        return None, policy.client
    if not isinstance(policy, VLLMPolicy) or not hasattr(policy.engine.llm_engine,
                                                         "model_executor"):
        return None, None  # the model is in a process that takes no questions
    handle = InProcessEngine(policy.engine)
    return (None, handle) if handle.workers else (engine_module(policy.engine), None)
