"""What an Atropos run is told about its memory: rows, devices, refusals. GPUs are stand-ins."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from grpo.run import device_memory
from grpo.run.build_engine import Setup
from grpo.run.cli import atropos
from grpo.run.cli.flags import FLAGS, in_flags, to_config
from grpo.run.ledger import GIB, DoesNotFitError, Ledger, Saving
from grpo.run.memory_atropos import advised, check_memory, devices
from grpo.run.start import Start
from grpo.run.start_atropos import _with_engine_defaults

CUDA = torch.device("cuda", 0)


@pytest.fixture
def gpus(monkeypatch) -> None:
    """Two GPUs of 80 GiB, the trainer on the first."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(device_memory, "capacity", lambda device: 80 * GIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 * GIB, 80 * GIB))


@pytest.fixture
def start_of(big_folder, gpus):
    def make(*argv: str, url: str | None = None) -> Start:
        config = to_config(atropos.parser().parse_intermixed_args(
            ["--model", big_folder, "--device", "cuda", *argv]))
        if url is not None:
            config = config.changed(inference_model={"url": url})
        config, length = _with_engine_defaults(config, big_folder, CUDA, "vllm")
        setup = Setup(config=config, path=big_folder, tokenizer=None, device=CUDA,
                      dtype=torch.bfloat16, max_model_len=length, folder=Path("here"))
        tables: list[str] = []
        console = SimpleNamespace(tables=tables, info=tables.append)
        return Start(setup, "vllm", None, None, None, {}, console)
    return make


def ledgers(start: Start) -> dict[str, Ledger]:
    return {who: ledger_of(start.setup.config) for who, _, ledger_of in devices(start)}


def found(start: Start) -> dict[str, list[Saving]]:
    """What is advised to whom."""
    return {who: advised(start, who, ledger_of, device_memory.available(start.setup.config, device))
            for who, device, ledger_of in devices(start)}


def sizes(ledger: Ledger) -> dict[str, int]:
    return {row.name: row.bytes for row in ledger.rows}


def test_the_default_run_of_a_1_5b_model_fits_a_gpu_of_80_gib(start_of):
    """Rows are cut to 2048 tokens, the engine takes 4096."""
    start = start_of()
    assert (start.setup.max_model_len, start.setup.config.atropos.seq_len) == (4096, 2048)
    check_memory(start)
    assert "4,096 tokens x" in start.console.tables[0]  # two rows a micro-batch


@pytest.mark.parametrize("mode", ["none", "lora_restart"])
def test_an_engine_on_another_gpu_is_counted_there(mode, start_of):
    together = sizes(ledgers(start_of("--weight-bridge-mode", mode))["this run"])
    found = ledgers(start_of("--weight-bridge-mode", mode, "--vllm-gpu", "1"))
    trainer, engine = (sizes(found[who]) for who in ("the trainer", "the engine on GPU 1"))
    assert {"engine", "KV cache", "generation"} <= set(together)
    assert not {"engine", "KV cache", "generation"} & set(trainer)
    assert engine["weights"] == together["engine"] and engine["KV cache"] == together["KV cache"]
    assert sizes(ledgers(start_of("--weight-bridge-mode", mode, "--vllm-gpu", "0"))["this run"]) \
        == together


def test_each_gpu_has_a_table_and_is_refused_by_its_own_memory(start_of):
    argv = "--weight-bridge-mode", "none", "--vllm-gpu", "1", "--kv-cache-memory-bytes"
    start = start_of(*argv, str(GIB))
    check_memory(start)
    assert [table.splitlines()[0] for table in start.console.tables] == [
        "memory of the trainer", "memory of the engine on GPU 1"]
    with pytest.raises(DoesNotFitError, match="the engine on GPU 1 needs .* KV cache 78.00 GiB"):
        check_memory(start_of(*argv, str(78 * GIB)))


def test_beside_an_engine_that_runs_already_only_free_memory_counts(start_of, monkeypatch):
    """It holds its part of the GPU, and weights that both read are in that part."""
    url, argv = "http://127.0.0.1:9001", ("--batch-size", "1")
    lent = ledgers(start_of(*argv, url=url))["this run"]
    assert sizes(lent)["weights"] == 0 and "KV cache" not in sizes(lent)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (lent.total, 80 * GIB))
    check_memory(start_of(*argv, url=url))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (lent.total - 1, 80 * GIB))
    with pytest.raises(DoesNotFitError, match="this run needs .* the device has room for"):
        check_memory(start_of(*argv, url=url))
    # Without an engine of others on it, all of the GPU is the run's.
    check_memory(start_of(*argv))


# -- advice ----------------------------------------------------------------------------------------


def changes_of(start: Start) -> dict[str, list[str]]:
    """By who needs the memory, what is advised, without remarks."""
    return {who: [saving.change.partition(" (")[0] for saving in savings]
            for who, savings in found(start).items()}


MODES = [["shared_vllm"], ["none"], ["none", "--vllm-restart-interval", "0"], ["lora_only"],
         ["lora_restart"], ["bridge"], ["none", "--vllm-gpu", "1"],
         ["lora_restart", "--vllm-gpu", "1"], ["shared_vllm", "--kv-cache-memory-bytes", "8000000"],
         ["none", "--batch-size", "6", "--train-layer-indices", "0-5"],
         ["shared_vllm", "train.optim_batch_size=32"]]


@pytest.mark.parametrize("argv", MODES, ids=" ".join)
def test_every_advice_is_taken_on_the_same_command_line_and_saves_what_it_says(argv, start_of):
    argv = ["--weight-bridge-mode", *argv]
    start = start_of(*argv)
    for who, savings in found(start).items():
        before = ledgers(start)[who]
        assert savings or "8000000" in argv
        for saving in savings:
            change, _, remark = saving.change.partition(" (")
            given = list(argv)
            # What is given by a flag is changed there: two names of one setting are refused.
            replaced = [name for flag in FLAGS for name in flag.names
                        if f"{flag.key}=" in change and name in given]
            if "no --vllm-restart-interval" in remark and "--vllm-restart-interval" in given:
                replaced.append("--vllm-restart-interval")
            for name in replaced:
                at = given.index(name)
                del given[at:at + 2]
            after = ledgers(start_of(*given, *change.split()))[who]
            assert before.total - after.total == saving.bytes > 0, saving


def test_what_is_advised_in_each_mode(start_of):
    batch = "atropos.batch_size=1 train.gradient_accumulation_steps=64"
    share = "inference_model.gpu_memory_utilization=0.26"
    every = {"train_model.gradient_checkpointing=true", "train_model.compile=true", batch}
    for argv, more in {
        "shared_vllm": {share, "--weight-bridge-mode lora_only"},
        "none": {share, "--weight-bridge-mode lora_only", "--weight-bridge-mode shared_vllm"},
        "lora_restart": {share, "--weight-bridge-mode lora_only",
                         "train_model.head_chunk_size=1024"},
        "bridge": {share, "train_model.lora.enabled=true"},
    }.items():
        told = changes_of(start_of("--weight-bridge-mode", argv))
        assert set(told["this run"]) == every | more
    apart = changes_of(start_of("--weight-bridge-mode", "none", "--vllm-gpu", "1"))
    assert set(apart["the trainer"]) == every | {
        "--weight-bridge-mode lora_restart --vllm-restart-interval 3"}
    assert apart["the engine on GPU 1"] == [share]
    # Its mode and size were chosen when it was started.
    assert set(changes_of(start_of(url="http://127.0.0.1:9001"))["this run"]) == every


def test_layers_a_batch_of_one_and_a_small_cache_leave_nothing_to_advise_there(start_of):
    changes = changes_of(start_of("--train-layer-indices", "0-5", "--batch-size", "1",
                               "--kv-cache-memory-bytes", str(150 << 20)))["this run"]
    # The cache holds one row of 4096 tokens, but half of it would not.
    assert set(changes) == {"train_model.gradient_checkpointing=true", "train_model.compile=true"}


def test_a_resumed_run_is_not_told_to_train_something_else(start_of):
    start = start_of()._replace(checkpoint=SimpleNamespace(folder=Path("here")))
    assert not any("lora" in change for change in changes_of(start)["this run"])


def test_the_refusal_names_the_flags(start_of):
    start = start_of("--batch-size", "8")
    with pytest.raises(DoesNotFitError) as error:
        check_memory(start)
    text = in_flags(str(error.value))
    assert "atropos.batch_size (--batch-size)=4 train.gradient_accumulation_steps " \
        "(--gradient-accumulation-steps)=64 saves" in text
    assert "and the device has room for 80.00 GiB" in text
