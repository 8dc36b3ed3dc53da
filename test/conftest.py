"""Shared pieces: a tiny model and its tokenizer on disk, one vLLM engine a session, the data."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# A loaded machine is slow, not wrong.
settings.register_profile("grpo", deadline=None, max_examples=25, derandomize=True)
settings.load_profile("grpo")

REPO = Path(__file__).resolve().parents[1]
EOS, PAD = 1, 0


def pytest_collection_modifyitems(items):
    """Whole runs, of which two go on at a time, may take longer than other tests. Tests with an
    engine are looked for in the files alone that have their mark."""
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(900))
        if item.get_closest_marker("vllm") and "mark.vllm" not in _text(item.path):
            raise pytest.UsageError(f"{item.nodeid} has the mark vllm, but tools/run_tests.py "
                                    f"finds no mark.vllm in {item.path.name}: write it there")


@cache
def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def tokenizer():
    from grpo.envs.embedded import byte_tokenizer

    return byte_tokenizer()


@pytest.fixture(scope="session", params=["bos", "bos and eos"])
def adding_tokenizer(request):
    """The byte tokenizer, made to put ``<bos>`` before a text, and to end it with ``<eos>``; its
    chat template writes the ``<bos>`` itself."""
    from tokenizers.processors import TemplateProcessing

    from grpo.envs.embedded import byte_tokenizer

    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<bos>"})
    names = ("<bos>", "<eos>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A <eos>" if "eos" in request.param else "<bos> $A",
        special_tokens=[(name, tokenizer.convert_tokens_to_ids(name)) for name in names])
    tokenizer.chat_template = "{{ bos_token }}" + tokenizer.chat_template
    return tokenizer


@pytest.fixture(scope="session")
def python() -> Path:
    """The interpreter that atroposlib's environments run with."""
    from grpo.atropos.launcher import environment_python

    path = Path(os.environ.get("GRPO_ATROPOS_PYTHON") or REPO / ".venv-atropos/bin/python")
    if not path.exists():
        pytest.skip("the environments' interpreter is not here; run `make atropos-env`")
    return environment_python(path)


@pytest.fixture(scope="session")
def cache(tmp_path_factory) -> Path:
    """For $XDG_CACHE_HOME of whole runs, so that one warm start of the embedded model serves all.

    Calls of pytest that `make test-slow` starts share that model too, by $GRPO_TEST_MODELS; the
    folder is each one's own, since its name marks the processes of its runs.
    """
    folder = tmp_path_factory.mktemp("cache")
    if shared := os.environ.get("GRPO_TEST_MODELS"):
        Path(shared).mkdir(parents=True, exist_ok=True)
        (folder / "torchrl-grpo").symlink_to(shared)
    return folder


@pytest.fixture
def tiny_model():
    """A fresh random Qwen2 in float64 with a small vocabulary; tests may change it."""
    return make_tiny_model()


def make_tiny_model(*, dtype: torch.dtype = torch.float64, vocab_size: int = 23, seed: int = 0,
                    **options):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(Qwen2Config(**{
        "vocab_size": vocab_size, "hidden_size": 16, "intermediate_size": 16,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
        "max_position_embeddings": 128, "tie_word_embeddings": True, "pad_token_id": PAD,
        "eos_token_id": EOS, "bos_token_id": None, "initializer_range": 0.3, **options}))
    return model.to(dtype)


@pytest.fixture
def byte_model(tokenizer):
    """A fresh random Qwen2 in float32 over the byte vocabulary; tests may change it."""
    return make_tiny_model(dtype=torch.float32, vocab_size=len(tokenizer))


@pytest.fixture(scope="session")
def prompts(tokenizer):
    """Twenty rendered additions of one-digit numbers, ``3+4=``."""
    from grpo.envs.prompts import render_all
    from grpo.envs.tasks import make_task

    task = make_task("arithmetic", max_operand=9, num_train=20, num_test=4)
    return render_all(task.split("train"), tokenizer, max_prompt_tokens=8, what="train")


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory, tokenizer) -> Path:
    """A random float32 model of the embedded shape, saved with its tokenizer."""
    from grpo.envs.embedded import EmbeddedSpec, small_qwen2

    folder = tmp_path_factory.mktemp("model")
    small_qwen2(EmbeddedSpec(), len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def engine(model_folder):
    """One in-process vLLM engine for the session; tests that write weights must put them back."""
    pytest.importorskip("vllm")
    from grpo.policies.inprocess import start_engine

    return start_engine(str(model_folder), device=torch.device("cpu"), dtype=torch.float32,
                        max_model_len=256, max_num_seqs=64)


@pytest.fixture(scope="session")
def gsm8k_folder() -> Path:
    """Real GSM8K files: ``$GRPO_TEST_DATA/gsm8k`` or ``../shared/data/gsm8k``."""
    root = Path(os.environ.get("GRPO_TEST_DATA", REPO.parent / "shared" / "data"))
    if not (root / "gsm8k" / "train.jsonl").exists():
        pytest.skip("the GSM8K files are not here; set GRPO_TEST_DATA to a folder with gsm8k/")
    return root / "gsm8k"


@pytest.fixture(scope="session")
def ifeval_file() -> Path:
    """The real rows of IFEval, from the same folder."""
    root = Path(os.environ.get("GRPO_TEST_DATA", REPO.parent / "shared" / "data"))
    if not (path := root / "ifeval" / "input_data.jsonl").exists():
        pytest.skip("IFEval's rows are not here; set GRPO_TEST_DATA to a folder with ifeval/")
    return path


@pytest.fixture(scope="session")
def gsm8k_rows(tmp_path_factory):
    """Two splits in GSM8K's format, of our own making, as long as the configuration asks for."""
    folder = tmp_path_factory.mktemp("gsm8k")
    for split in ("train", "test"):
        rows = [f'{{"question": "{split}: {i}+1?", "answer": "#### {i + 1}"}}' for i in range(256)]
        (folder / f"{split}.jsonl").write_text("\n".join(rows) + "\n")
    return folder


@pytest.fixture(scope="session")
def make_model():
    """:func:`make_tiny_model`, for tests that need several models or options."""
    return make_tiny_model


@pytest.fixture(scope="session")
def make_batch():
    """:func:`random_batch`."""
    return random_batch


def random_batch(model, *, seed: int = 0, prompts=(2, 4, 1, 3), responses=(5, 1, 6, 3),
                 noise: float = 0.4, temperature: float = 1.0, token_level: bool = False,
                 error_rows=()):
    """Dense batch whose sampling and reference log-probs lie ``noise`` nats around the model's."""
    from tensordict import TensorDict

    generator = torch.Generator().manual_seed(seed)
    prompts, responses = torch.tensor(prompts)[:, None], torch.tensor(responses)[:, None]
    B, T = len(prompts), int(prompts.max() + responses.max())
    attention = torch.arange(T) < prompts + responses
    assistant = attention & (torch.arange(T) >= prompts)
    # Not the padding token, whose embedding has no gradient in Transformers.
    tokens = torch.randint(PAD + 1, 23, (B, T), generator=generator) * attention
    with torch.no_grad():
        logits = model(input_ids=tokens, attention_mask=attention).logits / temperature
    log_probs = logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    log_probs = torch.nn.functional.pad(log_probs, (1, 0)).float()

    def near() -> torch.Tensor:
        return (log_probs + noise * torch.randn(B, T, generator=generator)) * assistant

    return TensorDict({
        "tokens": {"full": tokens},
        "masks": {"all_attention_mask": attention, "all_assistant_mask": assistant},
        "log_probs": {"full": near()},
        "next": {
            "reward": torch.randn(B, 1, generator=generator),
            "reward_error": torch.tensor([[row in error_rows] for row in range(B)]),
            "ref_log_probs": {"full": near()},
        },
        "group_id": torch.arange(B) // 2,
        "advantage": torch.randn(B, T if token_level else 1, generator=generator),
    }, batch_size=[B])
