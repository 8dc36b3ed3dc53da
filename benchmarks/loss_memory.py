"""Peak memory of a GRPO loss and its backward pass on a CPU, beside TorchRL's own loss.

    python benchmarks/loss_memory.py --out benchmarks/results/loss_memory_cpu.json

Each loss runs in a process of its own on the same model and batch. The figure is the growth of the
process's resident memory from just before the forward to its peak in the backward, in units of one
``[B, T, V]`` float32 tensor. The model is two narrow layers under a large vocabulary, so that the
log-prob head is what is measured. TorchRL's loss reads TorchRL's ragged batch and its own wrapper
of the same model.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from machine import Recording

LOSSES = ("ours", "ours, entropy bonus and KL", "torchrl")


def make_model(vocabulary: int, hidden: int):
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=2 * hidden,
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        max_position_embeddings=4096, tie_word_embeddings=True, pad_token_id=0, eos_token_id=1))


def make_batch(rows: int, prompt: int, response: int, vocabulary: int):
    """A dense batch of full rows with random tokens, log-probs and advantages."""
    import torch

    from grpo.data import ADVANTAGE, GROUP_ID, REF_LOG_PROBS, join_prompt_response

    tokens = torch.randint(2, vocabulary, (rows, prompt + response))
    ones = torch.ones_like(tokens, dtype=torch.bool)
    batch = join_prompt_response(
        tokens[:, :prompt], ones[:, :prompt], tokens[:, prompt:], ones[:, prompt:],
        torch.full((rows, response), -10.0), pad_token_id=0)
    batch[ADVANTAGE] = torch.randn(rows, 1)
    batch[GROUP_ID] = torch.arange(rows) // 2
    batch[REF_LOG_PROBS] = batch["log_probs", "full"].clone()
    return batch


def our_loss(model, batch, **options):
    from grpo import GRPOLoss, total_loss

    loss = GRPOLoss(model, **options)
    return lambda: total_loss(loss(batch))


def torchrl_loss(model, batch):
    from torchrl.modules.llm import TransformersWrapper
    from torchrl.objectives.llm import GRPOLoss

    from grpo.data.torchrl import to_torchrl
    from grpo.envs.embedded import byte_tokenizer

    actor = TransformersWrapper(
        model, tokenizer=byte_tokenizer(), input_mode="tokens", generate=False,
        return_log_probs=True, pad_output=False, pad_model_input=True)
    loss = GRPOLoss(actor, masking_strategy="rlhf", entropy_bonus=False)
    ragged = to_torchrl(batch)
    return lambda: loss(ragged).loss_objective


def memory(field: str) -> int:
    """``VmRSS`` or ``VmHWM`` of this process, bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}; this benchmark needs Linux")


def measure(args: argparse.Namespace) -> int:
    """Peak growth in bytes of one loss's forward and backward, in this process."""
    model = make_model(args.vocabulary, args.hidden)
    batch = make_batch(args.rows, args.prompt_tokens, args.response_tokens, args.vocabulary)
    if args.loss == "torchrl":
        loss = torchrl_loss(model, batch)
    elif args.loss == "ours":
        loss = our_loss(model, batch)
    else:
        loss = our_loss(model, batch, entropy_coeff=0.01, kl_to_ref_coeff=0.1)
    for parameter in model.parameters():  # the gradients themselves are not the loss's doing
        parameter.grad = parameter.detach().clone().zero_()
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    loss().backward()
    peak = memory("VmHWM")
    if not any(bool(p.grad.any()) for p in model.parameters()):
        raise RuntimeError(f"{args.loss}: the backward pass left no gradient")
    return peak - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--response-tokens", type=int, default=224)
    parser.add_argument("--vocabulary", type=int, default=65_536)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--loss", choices=LOSSES, help="measure one, in this process")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for each loss")
    parser.add_argument("--out", type=Path, help="where the JSON result is written")
    args = parser.parse_args()
    if args.loss:
        print(json.dumps(measure(args)))
        return
    tokens = args.prompt_tokens + args.response_tokens
    unit = args.rows * tokens * args.vocabulary * 4
    options = [option for name in ("rows", "prompt_tokens", "response_tokens", "vocabulary",
                                   "hidden")
               for option in (f"--{name.replace('_', '-')}", str(getattr(args, name)))]
    recording = Recording(
        "loss_memory", args.out,
        work=f"[B, T, V] = [{args.rows}, {tokens}, {args.vocabulary}] float32 = "
             f"{unit / 2**20:.0f} MiB")
    recording.describe_machine()
    results = {}
    for loss in LOSSES:
        child = subprocess.run([sys.executable, __file__, *options, "--loss", loss], check=True,
                               capture_output=True, text=True, timeout=args.timeout)
        peak = int(child.stdout.splitlines()[-1])
        results[loss] = {"peak_bytes": peak, "in_logits": round(peak / unit, 3)}
        recording.add(losses=results)
    recording.finish()


if __name__ == "__main__":
    main()
