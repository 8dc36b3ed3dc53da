"""Checkpoints: whole or absent, found again, exact."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
from importlib import metadata

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo.training import checkpoint as module
from grpo.training.checkpoint import (
    NotSavedError,
    find_checkpoint,
    list_checkpoints,
    random_state,
    restore_random_state,
    save_checkpoint,
    save_model,
)

TOKENS = torch.tensor([[5, 6, 7, 8]])


@pytest.fixture(scope="module")
def model(tokenizer):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, pad_token_id=0, eos_token_id=1,
        bos_token_id=None, tie_word_embeddings=True))


@pytest.fixture
def save(model, tokenizer):
    def save(run_dir, step, *, exp_name="run", state=None, keep=3, **options):
        return save_checkpoint(run_dir, step, model=model, tokenizer=tokenizer, state=state or {},
                               config={"train": {"exp_name": exp_name}}, keep=keep, **options)

    return save


def steps(run_dir) -> list[int]:
    return [found.step for found in list_checkpoints(run_dir)]


def folders(run_dir) -> set[str]:
    return {path.name for path in (run_dir / "checkpoints").iterdir()}


# -- Writing --------------------------------------------------------------------------------------


def test_a_checkpoint_has_state_information_and_a_model(save, tmp_path):
    saved = save(tmp_path, 7, state={"weights": torch.arange(3.0), "step": 7})
    assert saved.folder == tmp_path / "checkpoints" / "step_000007"
    assert saved.run_dir == tmp_path
    state = saved.state()  # loads with weights_only, so nothing in it can run code
    assert torch.equal(state["weights"], torch.arange(3.0))
    assert state["step"] == 7
    info = saved.info()
    assert info["step"] == 7
    assert info["config"]["train"]["exp_name"] == "run"
    assert info["versions"]["torch"] == metadata.version("torch")


def test_the_newest_are_kept(save, tmp_path):
    for step in (1, 2, 10, 11):
        save(tmp_path, step, keep=2)
    assert folders(tmp_path) == {"step_000010", "step_000011"}


def test_one_checkpoint_may_be_kept_beside_the_newest(save, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    protected = save(tmp_path, 1).folder.relative_to(tmp_path)
    for step in (2, 3, 4):
        save(tmp_path, step, keep=1, protect=[protected])
    assert folders(tmp_path) == {"step_000001", "step_000004"}
    save(tmp_path, 5, keep=1)  # the next process went on from another one
    assert folders(tmp_path) == {"step_000005"}


def test_a_checkpoint_of_an_earlier_step_deletes_no_later_one(save, tmp_path):
    for step in (10, 20, 30):
        save(tmp_path, step)
    save(tmp_path, 15, keep=1)
    assert folders(tmp_path) == {"step_000015", "step_000020", "step_000030"}


def test_saving_a_step_again_replaces_it(save, tmp_path):
    save(tmp_path, 5, state={"value": 1})
    assert save(tmp_path, 5, state={"value": 2}).state()["value"] == 2
    assert folders(tmp_path) == {"step_000005"}


@pytest.mark.parametrize(("broken", "error"), [
    ("save_model", OSError(28, "No space left on device")),
    ("record", RuntimeError("unexpected pos")),
    ("save_model", SafetensorError("I/O error: No space left on device"))])
def test_a_full_disk_leaves_what_was_there_and_says_where_and_how_much(
        save, tmp_path, monkeypatch, broken, error):
    save(tmp_path, 1)

    def full(*args, **kwargs):
        raise error

    monkeypatch.setattr(module, broken, full)
    with pytest.raises(NotSavedError, match=r"step_000002.partial could not be written \(.*MiB"):
        save(tmp_path, 2)
    assert folders(tmp_path) == {"step_000001"}


@pytest.mark.parametrize("broken", ["save_model", "versions", "flush"])
def test_a_write_that_is_interrupted_leaves_the_previous_checkpoint_as_the_newest(
        save, tmp_path, monkeypatch, broken):
    save(tmp_path, 1, state={"value": 1})

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, broken, interrupted)
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, 2)
    assert folders(tmp_path) == {"step_000001", "step_000002.partial"}
    assert steps(tmp_path) == [1]
    for resume in ("auto", str(tmp_path)):
        assert find_checkpoint(resume, root=tmp_path, exp_name="run").state()["value"] == 1
    save(tmp_path, 3)
    assert folders(tmp_path) == {"step_000001", "step_000003"}


@pytest.mark.parametrize(("renamed", "value"), [(0, 1), (1, 1), (2, 2)])
def test_a_step_that_is_saved_again_is_there_wherever_that_is_interrupted(
        save, tmp_path, monkeypatch, renamed, value):
    first = save(tmp_path, 5, state={"value": 1})
    replace, left = os.replace, iter(range(renamed))

    def interrupted(source, target):
        if source.parent == first.folder.parent and next(left, None) is None:
            raise KeyboardInterrupt
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, 5, state={"value": 2})
    assert steps(tmp_path) == [5]
    for resume in ("auto", str(tmp_path), str(first.folder)):
        found = find_checkpoint(resume, root=tmp_path, exp_name="run")
        assert found.damage() is None
        assert (found.step, found.state()["value"]) == (5, value)
    save(tmp_path, 6, protect=[found.folder])
    assert folders(tmp_path) == {found.folder.name, "step_000006"}
    save(tmp_path, 5, state={"value": 3})
    assert find_checkpoint(str(first.folder), root=tmp_path, exp_name="run").state()["value"] == 3
    assert folders(tmp_path) == {"step_000005", "step_000006"}


# -- Finding --------------------------------------------------------------------------------------


def test_auto_takes_the_newest_run_of_the_same_name(save, tmp_path):
    old, new, other = (tmp_path / name for name in ("day1/a", "day2/b", "day3/c"))
    saved = [save(old, 50), save(new, 10), save(other, 99, exp_name="another")]
    for age, checkpoint in zip((30, 20, 10), saved, strict=True):
        time = checkpoint.folder.stat().st_mtime - age
        os.utime(checkpoint.folder / "info.json", (time, time))
    # The newest by time, not the one with most steps.
    assert find_checkpoint("auto", root=tmp_path, exp_name="run") == saved[1]
    assert find_checkpoint("auto", root=tmp_path, exp_name="another") == saved[2]
    assert find_checkpoint("auto", root=tmp_path, exp_name="new") is None
    assert find_checkpoint("auto", root=tmp_path / "nothing", exp_name="run") is None


def test_a_path_may_be_a_run_or_one_of_its_checkpoints(save, tmp_path):
    first, second = save(tmp_path, 1), save(tmp_path, 2)
    assert find_checkpoint(str(tmp_path), root=tmp_path / "x", exp_name="y") == second
    assert find_checkpoint(str(first.folder), root=tmp_path / "x", exp_name="y") == first
    assert find_checkpoint(str(first.folder) + "/", root=tmp_path, exp_name="y") == first


def test_a_path_without_a_checkpoint_is_an_error_that_says_what_to_give(save, tmp_path):
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(FileNotFoundError, match=f"resume={path}: .*give a run's folder"):
            find_checkpoint(str(path), root=tmp_path, exp_name="run")
    partial = save(tmp_path, 1).folder.rename(tmp_path / "checkpoints" / "step_000001.partial")
    with pytest.raises(FileNotFoundError, match="no checkpoint there"):
        find_checkpoint(str(partial), root=tmp_path, exp_name="run")


def truncate(folder):
    (folder / "state.pt").write_bytes((folder / "state.pt").read_bytes()[:100])


def alter(folder):
    path = folder / "model" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def empty(folder):
    for path in list(folder.iterdir()):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def garble(folder):
    (folder / "info.json").write_bytes(b"\xff{")


DAMAGES = {
    "has 100 of": truncate, "its checksum differs": alter, "info.json is missing": empty,
    "info.json cannot be read": garble,
    "info.json is not that of a checkpoint": lambda folder: (folder / "info.json").write_text("3"),
    "model/model.safetensors is missing":
        lambda folder: (folder / "model" / "model.safetensors").unlink()}


@pytest.mark.parametrize("what", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(save, tmp_path, caplog, what):
    before, damaged = save(tmp_path / "run", 1), save(tmp_path / "run", 2)
    DAMAGES[what](damaged.folder)
    for resume in ("auto", str(tmp_path / "run")):
        caplog.clear()
        assert find_checkpoint(resume, root=tmp_path, exp_name="run") == before
        assert f"{damaged.folder} is damaged: " in caplog.text and what in caplog.text
    with pytest.raises(FileNotFoundError, match=f"is damaged: .*{what}.*before is {before.folder}"):
        find_checkpoint(str(damaged.folder), root=tmp_path, exp_name="run")
    # Saved again, it is whole again.
    assert save(tmp_path / "run", 2).damage() is None


def test_a_run_of_damaged_checkpoints_alone_blocks_no_other(save, tmp_path):
    whole, damaged = save(tmp_path / "a", 1), save(tmp_path / "b", 2)
    truncate(damaged.folder)
    assert find_checkpoint("auto", root=tmp_path, exp_name="run") == whole


def test_a_checkpoint_of_an_earlier_version_has_no_record_and_is_taken(save, tmp_path):
    saved = save(tmp_path, 1)
    info = saved.info()
    assert info.pop("files").keys() >= {"state.pt", "model/model.safetensors"}
    (saved.folder / "info.json").write_text(json.dumps(info))
    assert saved.damage() is None
    (saved.folder / "state.pt").unlink()
    assert saved.damage() == "state.pt is missing"


# -- Exactness ------------------------------------------------------------------------------------


def test_random_numbers_continue_exactly_after_a_restart(save, tmp_path):
    def draw():
        return ([random.random() for _ in range(3)], np.random.rand(3).tolist(),
                np.random.standard_normal(), torch.rand(3).tolist())

    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    np.random.standard_normal()  # numpy keeps the second half of a pair for later
    saved = save(tmp_path, 1)
    restore_random_state(saved.state()["random"])
    expected = draw()
    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(7)
    assert draw() != expected
    restore_random_state(saved.state()["random"])
    assert draw() == expected


class Gpus:
    """Stands in for ``torch.cuda``: so many GPUs, each with a state."""

    def __init__(self, monkeypatch, states: list[int], *, current: int) -> None:
        self.states = [torch.tensor(state) for state in states]
        for name, value in (("is_available", lambda: True), ("current_device", lambda: current),
                            ("device_count", lambda: len(self.states)),
                            ("get_rng_state_all", lambda: list(self.states)),
                            ("set_rng_state", self._set)):
            monkeypatch.setattr(torch.cuda, name, value)

    def _set(self, state: torch.Tensor, device: int) -> None:
        self.states[device] = state


@pytest.mark.parametrize("saved, used, present, now, expected", [
    ([1, 2, 3, 4], 0, 2, 0, [1, 2]),
    ([1, 2, 3, 4], 3, 2, 1, [1, 4]),  # the one in use goes on, whatever its number
    ([1, 2], 1, 3, 0, [2, 2, 0]),
    ([1, 2, 3], None, 2, 1, [1, 2]),  # of an earlier version
    ([1], None, 2, 1, [1, 0])])
def test_a_checkpoint_goes_on_with_other_gpus(monkeypatch, saved, used, present, now, expected):
    with monkeypatch.context() as patch:
        Gpus(patch, saved, current=used or 0)
        state = random_state()
    if used is None:
        state.pop("cuda_device", None)
    gpus = Gpus(monkeypatch, [0] * present, current=now)
    restore_random_state(state)
    assert [int(value) for value in gpus.states] == expected


def test_reading_the_random_state_draws_nothing():
    torch.manual_seed(0)
    expected = torch.rand(2)
    torch.manual_seed(0)
    random_state()
    assert torch.equal(torch.rand(2), expected)


@pytest.mark.parametrize("tied", [True, False])
def test_a_saved_model_loads_with_the_same_logits(byte_model, tokenizer, tmp_path, tied):
    model = byte_model
    if not tied:
        model.config.tie_word_embeddings = False
        model = type(model)(model.config)
        assert model.lm_head.weight is not model.model.embed_tokens.weight
    # As when an engine owns the memory: parameters are neighbours in one tensor.
    params = list(model.parameters())
    memory = torch.cat([param.detach().flatten() for param in params])
    for param, part in zip(params, memory.split([p.numel() for p in params]), strict=True):
        param.data = part.view_as(param)
    save_model(model, tokenizer, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert sum(tensor.numel() for tensor in stored.values()) == memory.numel()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    model.eval()
    with torch.no_grad():
        assert torch.equal(loaded(TOKENS).logits, model(TOKENS).logits)
    assert AutoTokenizer.from_pretrained(tmp_path)("3+4=")["input_ids"] == \
        tokenizer("3+4=")["input_ids"]


def test_a_generation_config_that_transformers_would_not_write_is_kept_as_it_was(
        model, tokenizer, tmp_path):
    """Vicuna has a temperature and no sampling; such a model can be read but not saved."""
    start = tmp_path / "start"
    save_model(model, tokenizer, start)
    path = start / "generation_config.json"
    path.write_text(json.dumps({"temperature": 0.9, "top_p": 0.6, "pad_token_id": 0}))
    loaded = AutoModelForCausalLM.from_pretrained(start)
    with pytest.raises(ValueError, match="temperature"):
        loaded.save_pretrained(tmp_path / "by_itself")
    save_model(loaded, tokenizer, tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "generation_config.json").read_text())
    assert {key: value for key, value in saved.items() if key != "transformers_version"} == (
        json.loads(path.read_text()))
    assert AutoModelForCausalLM.from_pretrained(
        tmp_path / "saved").generation_config.temperature == 0.9


def test_the_precision_of_a_saved_model_is_kept(model, tokenizer, tmp_path):
    save_model(copy.deepcopy(model).bfloat16(), tokenizer, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    assert AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").dtype == torch.bfloat16
