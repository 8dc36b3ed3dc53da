"""What makes a training step fast on a GPU, chosen where the configuration leaves it open.

Compiled layers take about a quarter less time than eager ones, once they are compiled; packed rows
compute a group's prompt once, and no padding; larger micro-batches keep the GPU busier, as long as
their activations fit. All depend on the model, the device and the length of the run, so ``null``
stands for what :func:`choose` finds best.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from grpo.config.schema import AnyConfig, Config
from grpo.objectives.packed_attention import no_kernel
from grpo.policies.model_shape import ModelShape
from grpo.run.ledger import Ledger, human
from grpo.training.learner import DEFAULT_TOKENS_PER_MICRO_BATCH

#: Architectures whose compiled layers have been measured, and whose attention is that of the packed
#: rows that have been, Qwen2's; others are compiled and packed only when asked to.
MEASURED = frozenset({"llama", "mistral", "qwen2", "qwen3"})
#: Floating-point operations of training from which on compiled layers are taken. Compiling takes
#: 20 to 50 s, depending on the host. An H200 trains eager layers at 400 TFLOP/s, of which compiled
#: ones save a quarter: 160 s of eager training earn 40 s. Slower GPUs gain more than that.
COMPILE_FROM = 160 * 4e14
#: Token budgets to choose from. From the first to 40,960 tokens a step gains another 3 %, for
#: 40 GiB more with 1.5 B parameters; at 8192 it loses 12 %.
BUDGETS = (20_480, 16_384, 12_288, 8192, 6144, 4096, 2048, 1024)
#: Share of the free memory that a chosen budget may fill: the ledger's activations are a formula,
#: and the last of the memory earns little. On an H100 a step with 16,384 tokens took 2.82 s and
#: 62.1 GiB, with 12,288 tokens 2.79 s and 57.4 GiB.
SHARE = 0.85


def choose(
    config: AnyConfig, shape: ModelShape, ledger_of: Callable[[AnyConfig], Ledger], *,
    device: torch.device, dtype: torch.dtype, backend: str, row_tokens: int, room: int,
) -> tuple[AnyConfig, list[str]]:
    """Fill in ``train_model.compile``, ``train.packing`` and ``train.max_tokens_per_micro_batch``
    where they are null.

    Args:
        ledger_of: what the training device needs under a configuration.
        device: that trains; on a CPU nothing is compiled or packed, and budgets are small.
        backend: ``"vllm"`` or ``"transformers"``.
        row_tokens: of the longest row.
        room: bytes of the device that the run may take.

    Returns:
        The configuration with these keys set, and why for each that was chosen on a GPU, in a line.
    """
    said, train = [], config.train

    def chosen(section: str, key: str, value: bool | int, why: str) -> None:
        nonlocal config
        config = config.changed(**{section: {key: value}})
        if device.type == "cuda":
            said.append(f"{section}.{key}={str(value).lower()}: {why}")

    if config.train_model.compile is None:
        chosen("train_model", "compile", *_compiled(config, shape, device, backend, row_tokens))
    if train.packing is None:
        chosen("train", "packing", *_packed(config, shape, device, dtype))
    if train.max_tokens_per_micro_batch is None and train.gradient_accumulation_steps is None:
        chosen("train", "max_tokens_per_micro_batch",
               *_budget(config, ledger_of, device, row_tokens, room))
    return config, said


def _compiled(
    config: Config, shape: ModelShape, device: torch.device, backend: str, row_tokens: int
) -> tuple[bool, str]:
    if device.type != "cuda" or backend != "vllm":
        return False, "generation with Transformers changes its shapes at every token"
    if config.train_model.quantization is not None:
        return False, "values of a quantised base are written out at each product"
    if shape.architecture not in MEASURED:
        return False, f"{shape.architecture} has not been measured; true compiles it"
    # Rows are taken to be half as long as the longest may be.
    tokens = config.iterations * config.train.epochs * config.turns_per_batch * row_tokens / 2
    per_token = (4 if config.train_model.lora.enabled else 6) * shape.parameters
    flop = tokens * per_token / config.train_model.ranks
    words = f"training is about {flop:.1e} floating-point operations, compiling pays from"
    return flop >= COMPILE_FROM, f"{words} {COMPILE_FROM:.1e}"


def _packed(
    config: Config, shape: ModelShape, device: torch.device, dtype: torch.dtype
) -> tuple[bool, str]:
    if device.type != "cuda":
        return False, "on a CPU"
    if shape.architecture not in MEASURED:
        return False, f"{shape.architecture} has not been measured; true packs its rows"
    if (attention := config.train_model.attn_implementation) not in (None, "sdpa"):
        return False, f"train_model.attn_implementation={attention}"
    if config.train_model.ranks > 1:
        return False, "packed rows have not been measured on several devices; true packs them"
    if reason := no_kernel(device, dtype, shape.head_dim):
        return False, reason
    return True, "no padding, and the rows of a group share their prompt"


def _budget(
    config: AnyConfig, ledger_of: Callable[[AnyConfig], Ledger], device: torch.device,
    row_tokens: int, room: int,
) -> tuple[int, str]:
    """The largest budget that fits; the smallest, if none does, which the ledger then refuses."""
    if device.type != "cuda":
        return DEFAULT_TOKENS_PER_MICRO_BATCH, "on a CPU"
    needed = 0
    for budget in BUDGETS:
        needed = ledger_of(config.changed(train={"max_tokens_per_micro_batch": budget})).total
        if needed <= SHARE * room or budget <= row_tokens:
            break
    return budget, f"the run then needs {human(needed)} of {human(room)}"
