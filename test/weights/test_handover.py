"""Handing tensors to another process: the memory, the file, and what goes wrong with either."""

from __future__ import annotations

import copy
import dataclasses
import json
import multiprocessing
import os
import re
import signal
import stat
import subprocess
import sys
from functools import reduce
from operator import getitem
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo.weights.fingerprint import fingerprint, fingerprints
from grpo.weights.handover import (
    Handover,
    HandoverError,
    StaleHandoverError,
    export_cuda_ipc,
    export_shared_memory,
    map_tensors,
    process_start,
    release,
)
from grpo.weights.handover_file import _HANDLE_FIELDS, FILE_NAME, StorageEntry, TensorEntry

REPO = Path(__file__).resolve().parents[2]


def make_params() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    embed = torch.nn.Parameter(torch.randn(7, 3))
    return {"embed": embed, "head": embed, "bias": torch.randn(5),
            "half": torch.randn(3, 3).bfloat16()}


def export(params, **options) -> Handover:
    return export_shared_memory(params, **{"model": "tiny", "owner": "trainer", **options})


def own_in_a_process(connection) -> None:
    """Export tensors, then report the bias whenever asked."""
    params = make_params()
    connection.send(export(params, owner="engine").to_dict())
    while connection.recv():
        connection.send(params["bias"].tolist())


@pytest.fixture
def owner():
    """A process that owns tensors, the pipe to it, and its handover."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=own_in_a_process, args=(there,), daemon=True)
    process.start()
    yield process, here, Handover.from_dict(here.recv())
    process.kill()
    process.join()


# --- memory ------------------------------------------------------------------------------------


def test_two_processes_have_one_memory(owner):
    _, pipe, handover = owner
    mapped = map_tensors(handover)
    assert {name: t.shape for name, t in mapped.items()} == {
        name: t.shape for name, t in make_params().items()}
    assert all(torch.equal(mapped[name], tensor) for name, tensor in make_params().items())
    mapped["bias"].copy_(torch.arange(5.0))
    pipe.send(True)
    assert pipe.recv() == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_the_mapping_outlives_a_killed_owner_and_the_handover_does_not(owner, tmp_path):
    process, _, handover = owner
    path, mapped = handover.write(tmp_path), map_tensors(handover)
    os.kill(process.pid, signal.SIGKILL)
    while process_start(process.pid) is not None:  # it is a zombie until somebody waits for it
        pass
    mapped["bias"].add_(1.0)
    assert torch.allclose(mapped["bias"], make_params()["bias"] + 1.0)
    for use in (lambda: map_tensors(handover), lambda: Handover.read(path)):
        with pytest.raises(StaleHandoverError, match=f"process {process.pid}, the engine that owns "
                                                     "the weights, has ended"):
            use()


def test_nothing_is_left_in_the_file_system(owner):
    before = set(os.listdir("/dev/shm"))
    process, _, handover = owner
    mapped = map_tensors(handover)
    assert set(os.listdir("/dev/shm")) == before
    process.kill()
    process.join()
    mapped["bias"].zero_()
    del mapped
    assert set(os.listdir("/dev/shm")) == before
    assert not [line for line in Path("/proc/self/maps").read_text().splitlines()
                if f" {handover.storages[0].handle['inode']} " in line]


def test_a_reused_pid_is_not_the_owner():
    handover = export(make_params())
    other = dataclasses.replace(handover, process_start=handover.process_start - 1)
    with pytest.raises(StaleHandoverError, match="its number was used again"):
        map_tensors(other)
    release(handover)


def test_tied_tensors_exist_once_and_stay_tied():
    params = make_params()
    expected = {name: tensor.detach().clone() for name, tensor in params.items()}
    handover = export(params)
    mapped = map_tensors(handover)
    assert params["head"] is params["embed"] and isinstance(params["embed"], torch.nn.Parameter)
    assert mapped["head"].data_ptr() == mapped["embed"].data_ptr()
    assert all(torch.equal(params[name], value) for name, value in expected.items())
    # 84, 20 and 18 bytes, each from the next multiple of 64 on.
    assert handover.storages[0].num_bytes == 128 + 64 + 64
    release(handover)


def test_views_of_one_storage_keep_their_places():
    slab = torch.arange(12.0)
    params = {"a": slab[:4].view(2, 2), "b": slab[3:12]}
    handover = export(params)
    mapped = map_tensors(handover)
    mapped["a"][1, 1] = -1.0
    assert params["b"][0] == -1.0 and mapped["b"][0] == -1.0
    assert handover.storages[0].num_bytes == 64
    release(handover)


@given(st.lists(st.tuples(
    st.lists(st.integers(1, 5), max_size=3),
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.int8])),
    min_size=1, max_size=6))
def test_any_tensors_arrive_aligned_and_unchanged(specs):
    params = {f"t{i}": torch.randn(shape).mul(50).to(dtype)
              for i, (shape, dtype) in enumerate(specs)}
    expected = {name: tensor.clone() for name, tensor in params.items()}
    handover = export(params)
    mapped = map_tensors(Handover.from_dict(json.loads(json.dumps(handover.to_dict()))))
    for name, value in expected.items():
        assert mapped[name].dtype == value.dtype
        assert torch.equal(mapped[name], value) and torch.equal(params[name], value)
        assert mapped[name].data_ptr() % 64 == params[name].data_ptr() % 64 == 0
    release(handover)


def test_tensors_that_cannot_be_shared_are_named():
    with pytest.raises(HandoverError, match=r"wt \(3, 2\) is empty or not contiguous"):
        export({"ok": torch.ones(2), "wt": torch.ones(2, 3).t()})
    with pytest.raises(HandoverError, match="m lies on meta"):
        export({"m": torch.ones(2, device="meta")})
    with pytest.raises(HandoverError, match="a lies on cpu, but .* for cuda tensors"):
        export_cuda_ipc({"a": torch.ones(2)}, model="tiny", owner="engine")
    with pytest.raises(HandoverError, match="no tensors"):
        export({})


def test_released_memory_cannot_be_mapped_and_another_file_is_not_mistaken_for_it():
    handover = export({"a": torch.ones(3)})
    fd = handover.storages[0].handle["fd"]
    release(handover)
    with pytest.raises(HandoverError, match=f"/proc/{os.getpid()}/fd/{fd}.* cannot be opened"):
        map_tensors(handover)
    other = os.open("/dev/null", os.O_RDWR)
    assert other == fd  # the lowest free number
    with pytest.raises(StaleHandoverError, match="no longer the memory"):
        map_tensors(handover)
    os.close(other)


def cuda_handover() -> dict:
    return {**export({"a": torch.ones(2)}).to_dict(), "kind": "cuda_ipc", "storages": [{
        "device": "cuda:0", "num_bytes": 64, "handle": {
            "gpu": "GPU-0", "memory": "AAAA", "memory_offset": 0, "ref_counter": "AAAA",
            "ref_counter_offset": 0, "event": "AAAA", "event_sync_required": True}}]}


def test_gpu_memory_cannot_be_mapped_by_its_own_process_or_without_a_gpu(owner):
    handover = Handover.from_dict(cuda_handover())
    with pytest.raises(HandoverError, match="its own GPU memory.*SingleCopy"):
        map_tensors(handover)
    if torch.cuda.is_available():
        pytest.skip("the other case needs a machine without a GPU")
    _, _, others = owner
    handover = dataclasses.replace(handover, pid=others.pid, process_start=others.process_start)
    with pytest.raises(HandoverError, match=f"cuda:0 of process {others.pid}.*sees no GPU"):
        map_tensors(handover)


# --- the file ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def handover():
    made = export(make_params())
    yield made
    release(made)


def test_the_file_round_trips_is_private_and_replaces_an_old_one(handover, tmp_path):
    path = handover.write(tmp_path)
    assert path == tmp_path / FILE_NAME == tmp_path / "vllm_bridge_config.json"
    assert Handover.read(path) == Handover.read(tmp_path) == handover
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.write_text("old")
    path.chmod(0o644)
    handover.write(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == [FILE_NAME]


def test_a_missing_and_a_truncated_file_are_named(handover, tmp_path):
    with pytest.raises(HandoverError, match=f"{tmp_path}/{FILE_NAME}: there is no such file"):
        Handover.read(tmp_path)
    path = handover.write(tmp_path)
    whole = path.read_text()
    for size in range(0, len(whole) - 1, 97):
        path.write_text(whole[:size])
        with pytest.raises(HandoverError, match=f"{path}: not valid JSON"):
            Handover.read(path)


@pytest.mark.parametrize("place, value, complaint", [
    (("format",), 2, "field 'format' is 2 but must be one of"),
    (("kind",), "disk", "field 'kind' is 'disk'"),
    (("owner",), "me", "field 'owner' is 'me'"),
    (("pid",), "12", "field 'pid' is '12' but must be of type int"),
    (("pid",), True, "field 'pid' is True"),
    (("tensor_parallel_size",), 0, "field 'tensor_parallel_size' is 0 but must be at least 1"),
    (("extra",), 1, "field 'extra' is unknown"),
    (("storages", 0), 3, r"storages\[0\]: must be an object"),
    (("storages", 0, "num_bytes"), 0, r"storages\[0\]: field 'num_bytes' is 0"),
    (("storages", 0, "handle", "fd"), None, r"storages\[0\]: handle: field 'fd' is None"),
    (("tensors", 1, "name"), "embed", r"tensors\[1\]: field 'name' is 'embed'.*used once"),
    (("tensors", 1, "shape"), [7, "3"], r"tensors\[1\]: field 'shape' is \[7, '3'\]"),
    (("tensors", 1, "shape"), [700, 3], r"tensors\[1\]: field 'offset' is 0 .*head \[700, 3\]"),
    (("tensors", 2, "dtype"), "float33", r"tensors\[2\]: field 'dtype' is 'float33'"),
    (("tensors", 2, "dtype"), "nn", r"tensors\[2\]: field 'dtype' is 'nn'"),
    (("tensors", 2, "storage"), 1, r"tensors\[2\]: field 'storage' is 1 .*the 1 storages"),
    (("tensors", 2, "offset"), 130, r"tensors\[2\]: field 'offset' is 130 .*multiple of 4"),
    (("tensors", 2, "offset"), -4, r"tensors\[2\]: field 'offset' is -4"),
])
def test_an_edited_file_is_refused_with_the_field(handover, tmp_path, place, value, complaint):
    raw = json.loads(json.dumps(handover.to_dict()))
    *path, field = place
    reduce(getitem, path, raw)[field] = value
    file = tmp_path / FILE_NAME
    file.write_text(json.dumps(raw))
    with pytest.raises(HandoverError, match=complaint) as error:
        Handover.read(file)
    assert str(file) in str(error.value) and "write it again" in str(error.value)


def test_every_field_is_required(handover):
    def removals(raw, where=()):
        items = raw.items() if isinstance(raw, dict) else enumerate(raw)
        for key, value in items:
            if isinstance(raw, dict):
                yield (*where, key)
            if isinstance(value, (dict, list)) and key != "shape":
                yield from removals(value, (*where, key))

    for whole in (json.loads(json.dumps(handover.to_dict())), cuda_handover()):
        for *path, field in removals(whole):
            raw = copy.deepcopy(whole)
            del reduce(getitem, path, raw)[field]
            with pytest.raises(HandoverError, match=f"field '{field}' is missing"):
                Handover.from_dict(raw)


def test_a_damaged_gpu_handle_is_named():
    raw = cuda_handover()
    raw["storages"][0]["handle"]["event"] = "!"
    with pytest.raises(HandoverError, match=r"storages\[0\]: handle: field 'event' is '!'.*base64"):
        Handover.from_dict(raw)


# --- fingerprints ------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3, 4, (1 << 22) + 5])  # the last takes two chunks
def test_a_fingerprint_follows_every_byte(size):
    tensor = torch.arange(size, dtype=torch.int32).float()
    before = fingerprint(tensor)
    assert fingerprint(tensor.clone()) == before
    for index in {0, size // 2, size - 1}:
        changed = tensor.clone()
        changed.view(torch.uint8)[4 * index] ^= 1
        assert fingerprint(changed) != before


@given(st.lists(st.integers(-128, 127), min_size=2, max_size=40), st.randoms())
def test_a_fingerprint_depends_on_the_order_and_not_on_the_address(values, random):
    shuffled = values.copy()
    random.shuffle(shuffled)
    tensor = torch.tensor(values, dtype=torch.int8)
    shifted = torch.cat([torch.zeros(3, dtype=torch.int8), tensor])[3:]
    assert fingerprint(tensor) == fingerprint(shifted)
    same = fingerprint(tensor) == fingerprint(torch.tensor(shuffled, dtype=torch.int8))
    assert same == (values == shuffled)


def test_fingerprints_are_those_of_each_tensor_and_see_chunks_that_change_places():
    first, second = torch.arange(1 << 22), torch.ones(3, dtype=torch.bfloat16)
    swapped = torch.cat([first[1 << 21:], first[: 1 << 21]])
    tensors = [first, swapped, second, torch.empty(0), second[1:]]
    found = fingerprints(tensor for tensor in tensors)
    assert found == [fingerprint(tensor) for tensor in tensors]
    assert len(set(found)) == len(tensors)
    assert fingerprints([]) == []


def test_a_fingerprint_is_that_of_any_layout():
    tensor = torch.randn(6, 5)
    assert fingerprint(tensor.t()) == fingerprint(tensor.t().contiguous()) != fingerprint(tensor)


# --- a real GPU --------------------------------------------------------------------------------


OWN_ON_THE_GPU = """
import json, sys, torch
from grpo.weights.fingerprint import fingerprint
from grpo.weights.handover import export_cuda_ipc

params = {"a": torch.arange(6.0, device="cuda").view(2, 3),
          "b": torch.arange(5, device="cuda").bfloat16()}
params["tied"] = params["a"]
print(json.dumps(export_cuda_ipc(params, model="tiny", owner="engine").to_dict()), flush=True)
for _ in sys.stdin:
    torch.cuda.synchronize()
    print(json.dumps({n: fingerprint(t) for n, t in params.items()}), flush=True)
"""


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_two_processes_have_one_gpu_memory():
    owner = subprocess.Popen([sys.executable, "-c", OWN_ON_THE_GPU], stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE, text=True, cwd=REPO)
    mapped = map_tensors(Handover.from_dict(json.loads(owner.stdout.readline())))
    assert mapped["a"].tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert mapped["tied"].data_ptr() == mapped["a"].data_ptr()
    mapped["b"].mul_(2.0)
    torch.cuda.synchronize()
    owner.stdin.write("report\n")
    owner.stdin.flush()
    theirs = json.loads(owner.stdout.readline())
    assert theirs == {name: fingerprint(tensor) for name, tensor in mapped.items()}
    assert theirs["b"] == fingerprint(mapped["b"].cpu())
    del mapped
    owner.stdin.close()
    assert owner.wait(30) == 0


def test_the_guides_table_of_earlier_names_has_every_field():
    guide = (REPO / "examples/atropos/README.md").read_text()
    table = guide.partition("had a key, this one has")[2].split("\n\n")[1]
    here = {name for line in table.splitlines()[2:]
            for name in re.findall(r"`(\w+)`", line.split("|")[2])}
    ours = {field.name for kind in (Handover, StorageEntry, TensorEntry)
            for field in dataclasses.fields(kind)}
    ours |= set(_HANDLE_FIELDS["cuda_ipc"])
    # Which process the memory is of was not said there.
    assert here == ours - {"owner", "kind", "pid", "process_start"}
