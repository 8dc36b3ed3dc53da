"""The embedded model: a small Qwen2 and a byte tokenizer, made on the spot.

With no network and no downloaded weights there is nothing to fine-tune, so a run with
``model.name=embedded`` first makes its own model and **warm-starts** it for well under a minute on
solutions of which a share is deliberately wrong: the carry is dropped. The model then knows the
format and a systematic mistake; GRPO takes it from there with rewards alone. The result is cached
under a key of everything that went into it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import shutil
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn, set_num_threads  # kept, because vLLM for CPUs puts another in its place

from grpo.envs.prompts import render
from grpo.envs.tasks.arithmetic import ArithmeticTask
from grpo.envs.tokenizer_files import save_tokenizer

logger = logging.getLogger(__name__)

_FILES = 2  # raised when other files are written; 2: a tokenizer that transformers 4 reads


@dataclass(frozen=True)
class EmbeddedSpec:
    """Everything the warm start depends on."""

    hidden_size: int = 128  # feed-forward is twice as wide
    num_layers: int = 2
    steps: int = 1000
    batch_size: int = 128  # solutions a step
    learning_rate: float = 2e-3  # AdamW's, at its peak
    noise: float = 0.7  # share of solutions in which the carry is forgotten
    seed: int = 0  # of the initial weights and of the noise
    context: int = 2048  # greatest number of tokens that the model accepts


def byte_tokenizer() -> Any:
    """A tokenizer with one token a byte, ``<pad>``, ``<eos>`` and a plain chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = ["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    # No byte is unknown. Without a name for it AutoTokenizer would add Qwen2's, one token more than
    # the model has.
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>",
                                   unk_token="<pad>")
    fast.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}")
    return fast


def small_qwen2(spec: EmbeddedSpec, vocabulary: int) -> nn.Module:
    """A Qwen2-shaped model with random weights, float32."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(spec.seed)
    return Qwen2ForCausalLM(Qwen2Config(
        vocab_size=vocabulary, hidden_size=spec.hidden_size,
        intermediate_size=2 * spec.hidden_size, num_hidden_layers=spec.num_layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=spec.context,
        tie_word_embeddings=True, pad_token_id=0, eos_token_id=1, bos_token_id=None))


def embedded_model(
    task: ArithmeticTask, spec: EmbeddedSpec, *, cache_dir: Path | None = None
) -> Path:
    """Folder of the model, warm-started on a task's training problems, and of its tokenizer; made
    if it is not cached.

    Args:
        task: its test problems are never seen.
        spec: of the model and of the warm start.
        cache_dir: default ``$XDG_CACHE_HOME/torchrl-grpo`` or ``~/.cache/torchrl-grpo``.
    """
    folder = (cache_dir or default_cache()) / f"embedded-{_key(task, spec)}"
    if not (folder / "config.json").exists():
        _make(folder, task, spec)
    return folder


def default_cache() -> Path:
    """Where warm starts are kept between runs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "torchrl-grpo")


def _key(task: ArithmeticTask, spec: EmbeddedSpec) -> str:
    content = {"spec": asdict(spec), "prompts": [p.prompt + p.answer for p in task.train],
               "slips": [task.slip(p) for p in task.train],
               "torch": torch.__version__, "files": _FILES}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def _make(folder: Path, task: ArithmeticTask, spec: EmbeddedSpec) -> None:
    tokenizer = byte_tokenizer()
    logger.info("making the embedded model: %d warm-start steps on additions, %.0f %% of them with "
                "a forgotten carry; kept in %s", spec.steps, 100 * spec.noise, folder.parent)
    with torch.random.fork_rng([]), ExitStack() as at_end:
        model = small_qwen2(spec, len(tokenizer))
        start = time.monotonic()
        # The model is so narrow that several threads would mostly wait for each other, up to nine
        # tenths of the time when another process uses the same cores.
        at_end.callback(set_num_threads, torch.get_num_threads())
        set_num_threads(1)
        loss = warm_start(model, tokenizer, task, spec)
    logger.info("warm start: %d steps in %.0f s, loss %.3f", spec.steps, time.monotonic() - start,
                loss)
    # Written aside and renamed, so that an interrupted run leaves no half-made cache entry.
    partial = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
    model.save_pretrained(partial)
    save_tokenizer(tokenizer, partial)
    try:
        partial.rename(folder)
    except OSError:  # another run finished the same model first; it is as good as ours
        shutil.rmtree(partial)


def warm_start(model: nn.Module, tokenizer: Any, task: ArithmeticTask, spec: EmbeddedSpec) -> float:
    """Teach a fresh model the format, on solutions of which ``spec.noise`` are wrong; the last
    step's cross-entropy, in nats a token."""
    rng = random.Random(spec.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=spec.learning_rate)
    warm_up = max(1, spec.steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min(1.0, (i + 1) / warm_up) * (1.0 - 0.9 * i / spec.steps))
    prompts = {p.id: render(p, tokenizer) for p in task.train}
    loss = torch.zeros(())
    for _ in range(spec.steps):
        problems = rng.choices(task.train, k=spec.batch_size)
        answers = [task.slip(p) if rng.random() < spec.noise else p.answer for p in problems]
        rows = [prompts[p.id] + ids + [tokenizer.eos_token_id]
                for p, ids in zip(problems, tokenizer(answers)["input_ids"], strict=True)]
        tokens = torch.tensor(rows)
        first = len(prompts[problems[0].id])  # prompts and answers have fixed widths
        logits = model(tokens).logits[:, first - 1 : -1]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, first:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return loss.item()
