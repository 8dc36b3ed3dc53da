"""The embedded model: made once, cached under everything it depends on, never half."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo.envs import embedded
from grpo.envs.embedded import EmbeddedSpec, byte_tokenizer, embedded_model, small_qwen2, warm_start
from grpo.envs.tasks import make_task

SPEC = EmbeddedSpec(hidden_size=16, num_layers=1, steps=2, batch_size=4, context=32)


@pytest.fixture(scope="module")
def task():
    return make_task("arithmetic", max_operand=9, num_train=60, num_test=10)


@pytest.fixture
def trainings(monkeypatch):
    """The number of threads of each warm start that has really run."""
    ran = []

    def counted(*args, **kwargs):
        ran.append(torch.get_num_threads())
        return warm_start(*args, **kwargs)

    monkeypatch.setattr(embedded, "warm_start", counted)
    return ran


def test_a_warm_start_is_made_once_and_loads_with_its_tokenizer(task, trainings, tmp_path):
    folder = embedded_model(task, SPEC, cache_dir=tmp_path)
    assert embedded_model(task, SPEC, cache_dir=tmp_path) == folder
    assert len(trainings) == 1
    model, tokenizer = (cls.from_pretrained(folder) for cls in (AutoModelForCausalLM,
                                                                AutoTokenizer))
    assert model.config.vocab_size == len(tokenizer) == 258
    assert tokenizer.chat_template == byte_tokenizer().chat_template
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_warm_start_takes_one_thread_and_gives_the_others_back(task, trainings, tmp_path):
    before = torch.get_num_threads()
    embedded.set_num_threads(2)
    try:
        embedded_model(task, SPEC, cache_dir=tmp_path)
        assert (trainings, torch.get_num_threads()) == ([1], 2)
    finally:
        embedded.set_num_threads(before)


def test_all_that_a_warm_start_depends_on_has_its_own_cache_entry(task, tmp_path):
    same, other = (make_task("arithmetic", max_operand=9, num_train=count, num_test=10)
                   for count in (60, 59))
    changes = {"hidden_size": 32, "num_layers": 2, "steps": 3, "batch_size": 5,
               "learning_rate": 1e-3, "noise": 0.1, "seed": 1, "context": 64}
    assert changes.keys() == asdict(SPEC).keys()
    folder = embedded_model(task, SPEC, cache_dir=tmp_path)
    assert embedded_model(same, SPEC, cache_dir=tmp_path) == folder
    entries = {folder, embedded_model(other, SPEC, cache_dir=tmp_path),
               *(embedded_model(task, replace(SPEC, **{name: value}), cache_dir=tmp_path)
                 for name, value in changes.items())}
    assert len(entries) == 2 + len(changes)


@pytest.mark.parametrize("at", ["tokenizer", "rename"])
def test_an_interrupted_write_leaves_no_cache_entry(task, trainings, tmp_path, monkeypatch, at):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if at == "tokenizer":
            from transformers import PreTrainedTokenizerFast
            patch.setattr(PreTrainedTokenizerFast, "save_pretrained", interrupted)
        else:
            patch.setattr(type(tmp_path), "rename", interrupted)
        with pytest.raises(KeyboardInterrupt):
            embedded_model(task, SPEC, cache_dir=tmp_path)
    assert not [path for path in tmp_path.iterdir() if not path.name.endswith(".partial")]
    folder = embedded_model(task, SPEC, cache_dir=tmp_path)
    assert len(trainings) == 2
    AutoTokenizer.from_pretrained(folder)
    AutoModelForCausalLM.from_pretrained(folder)
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


def test_the_same_specification_gives_the_same_weights_and_disturbs_no_random_numbers(
        task, tmp_path):
    torch.manual_seed(5)
    state = torch.get_rng_state()
    weights = []
    for name in "ab":
        folder = embedded_model(task, SPEC, cache_dir=tmp_path / name)
        weights.append(AutoModelForCausalLM.from_pretrained(folder).state_dict())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


def sequences(task, spec) -> list[str]:
    """Every text that a warm start trains on."""
    tokenizer = byte_tokenizer()
    model = small_qwen2(spec, len(tokenizer))
    seen = []
    model.register_forward_pre_hook(
        lambda module, args: seen.extend(tokenizer.batch_decode(args[0])))
    warm_start(model, tokenizer, task, spec)
    return [text.removesuffix("<eos>") for text in seen]


def test_a_warm_start_sees_every_training_problem_and_no_test_problem(task):
    texts = sequences(task, replace(SPEC, steps=20, batch_size=40))
    asked = {text.split("=")[0] + "=" for text in texts}
    assert asked == {problem.prompt for problem in task.train}
    assert not asked & {problem.prompt for problem in task.test}


@pytest.mark.parametrize("noise", [0.0, 0.5, 1.0])
def test_where_something_is_carried_the_share_of_slips_is_the_noise(task, noise):
    texts = sequences(task, replace(SPEC, steps=10, batch_size=40, noise=noise))
    carried = [p for p in task.train if task.slip(p) != p.answer]
    right = {problem.prompt + problem.answer for problem in task.train}
    wrong = {problem.prompt + task.slip(problem) for problem in carried}
    assert set(texts) <= right | wrong
    asked = {problem.prompt for problem in carried}
    slips = [text in wrong for text in texts if text.split("=")[0] + "=" in asked]
    assert len(slips) > 100
    assert sum(slips) / len(slips) == pytest.approx(noise, abs=0.0 if noise in (0, 1) else 0.1)


def test_a_warm_start_learns(task):
    spec = replace(SPEC, hidden_size=32, steps=1, batch_size=64, noise=0.0)
    first = warm_start(small_qwen2(spec, 258), byte_tokenizer(), task, spec)
    spec = replace(spec, steps=60, learning_rate=1e-2)
    assert warm_start(small_qwen2(spec, 258), byte_tokenizer(), task, spec) < 0.5 * first


def test_the_byte_tokenizer_is_lossless_with_one_token_a_byte(tokenizer):
    for text in ("3+4=7", "ä €\n\t ok", "user: hi"):
        ids = tokenizer(text)["input_ids"]
        assert len(ids) == len(text.encode())
        assert tokenizer.decode(ids) == text


def test_the_cache_lies_where_the_user_keeps_caches(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert embedded.default_cache() == tmp_path / "torchrl-grpo"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert embedded.default_cache() == tmp_path / ".cache" / "torchrl-grpo"
