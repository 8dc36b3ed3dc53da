"""What an engine is asked to map is looked at before the engine starts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
import torch

from grpo.policies.inprocess import start_engine
from grpo.weights.handover import FILE_NAME, HandoverError, StaleHandoverError
from grpo.weights.shared_loader import check_handover, own_weights


@pytest.fixture
def folder(byte_model, tmp_path):
    byte_model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def start(folder, **options):
    return start_engine(str(folder), **{
        "device": torch.device("cpu"), "dtype": torch.float32, "max_model_len": 64,
        "separate_process": True, **options})


def test_the_trainers_own_model_is_accepted(byte_model, folder, tmp_path):
    handover, _ = own_weights(byte_model, name=str(folder))
    check_handover(handover.write(tmp_path), str(folder), torch.float32)


def test_another_model_or_dtype_is_named_before_an_engine_starts(make_model, folder, tmp_path):
    wider = make_model(dtype=torch.float32, vocab_size=258, intermediate_size=24,
                       num_hidden_layers=1)
    path = own_weights(wider, name="wider")[0].write(tmp_path)
    with pytest.raises(HandoverError, match="of wider does not fit an engine of .*model") as info:
        start(folder, handover=path)
    assert "layers.1.mlp.down_proj.weight: missing" in str(info.value)
    assert "gate_up_proj.weight: shape (48, 16) in the handover, (32, 16)" in str(info.value)
    with pytest.raises(HandoverError, match="norm.weight: dtype torch.float32 in the handover, "
                                            "torch.bfloat16 in an engine"):
        check_handover(path, str(folder), torch.bfloat16)


def test_a_stale_file_is_refused_before_an_engine_starts(folder, tmp_path):
    script = ("import sys, time, torch\n"
              "from grpo.weights.handover import export_shared_memory\n"
              "handover = export_shared_memory({'norm.weight': torch.ones(3)}, model='tiny',"
              " owner='trainer')\n"
              "handover.write(sys.argv[1])\n"
              "print('written', flush=True)\n"
              "time.sleep(600)\n")
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], text=True,
                          stdout=subprocess.PIPE) as trainer:
        assert trainer.stdout.readline() == "written\n"
        os.kill(trainer.pid, signal.SIGKILL)
    with pytest.raises(StaleHandoverError, match=f"process {trainer.pid}, the trainer that owns "
                                                 "the weights, has ended.*restart it"):
        start(folder, handover=tmp_path)


def test_only_an_engine_of_its_own_process_maps_a_handover(folder, tmp_path):
    with pytest.raises(ValueError, match="separate_process=True"):
        start(folder, handover=tmp_path, separate_process=False)
    with pytest.raises(HandoverError, match=f"{FILE_NAME}: there is no such file"):
        start(folder, handover=tmp_path)
