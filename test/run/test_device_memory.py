"""From a configuration to its ledger, and what a device has."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from grpo import data
from grpo.config.asynchronous import AsyncConfig
from grpo.config.schema import Config, load_config
from grpo.policies.inprocess import kv_cache_bytes
from grpo.policies.model_shape import LoRA, ModelShape
from grpo.run import device_memory
from grpo.run.device_memory import (
    available,
    capacity,
    cgroup_limits,
    check_roles_fit,
    role_ledgers,
    run_ledger,
)
from grpo.run.ledger import GIB, PHASES, DoesNotFitError, Ledger
from grpo.run.placement import DevicePlan, plan_devices

from ..config.configs import small
from .memory_probe import family

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("shape")
    family("Qwen2Config", vocab_size=4000).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def larger_folder(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("larger")
    family("Qwen2Config", vocab_size=4000, num_hidden_layers=4).save_pretrained(path)
    return str(path)


def settings(backend: str = "vllm", schema: type[Config] = Config, **changes) -> Config:
    changes["inference_model"] = {"backend": backend, "max_tokens": 24,
                                  **changes.get("inference_model", {})}
    return load_config(small(model={"name": "some/model"}, **changes), schema)


def ledger_of(config: Config, folder: str, **options) -> Ledger:
    return run_ledger(config, model_path=folder, **_run(config, options))


def roles_of(config: AsyncConfig, places: DevicePlan, folder: str, **options) -> dict[str, Ledger]:
    return role_ledgers(config, places, model_path=folder, **_run(config, options))


def _run(config: Config, options: dict) -> dict:
    return {"device": CPU, "dtype": torch.float32, "max_model_len": 64,
            "backend": config.inference_model.backend, **options}


def row(ledger: Ledger, name: str):
    return next(row for row in ledger.rows if row.name == name)


# -- from the configuration -----------------------------------------------------------------------


def test_the_kv_cache_is_the_one_the_engine_will_be_started_with(folder):
    config = settings(env={"num_envs": 64, "repeats": 64}, train={"total_dialog_turns": 4096})
    engine = kv_cache_bytes(folder, rows=1024, tokens=64, dtype=torch.float32, device=CPU)
    assert engine > 64 * 2**20  # the least it takes
    cache = row(ledger_of(config, folder), "KV cache")
    assert (cache.bytes, cache.phases) == (engine, PHASES)


@pytest.mark.parametrize("options, expected", [
    ({"kv_cache_memory_bytes": 3 * GIB}, 3 * GIB),
    ({"max_num_seqs": 4, "kv_cache_memory_bytes": 5}, 5),
])
def test_a_configured_kv_cache_is_taken_as_it_is(folder, options, expected):
    assert row(ledger_of(settings(inference_model=options), folder), "KV cache").bytes == expected


def test_a_share_of_the_gpu_is_for_weights_cache_and_generation(folder, monkeypatch):
    monkeypatch.setattr(device_memory, "capacity", lambda device: 80 * GIB)
    ledger = ledger_of(settings(inference_model={"gpu_memory_utilization": 0.5}), folder,
                       device=CUDA, dtype=torch.bfloat16)
    assert sum(row(ledger, name).bytes for name in ("weights", "KV cache", "generation")) == (
        40 * GIB)


def test_longer_answers_of_benchmarks_need_a_cache_and_no_training(folder):
    config = settings(schema=AsyncConfig)
    places = plan_devices(config, kind="cpu", available=None)
    before = roles_of(config, places, folder)
    longer = roles_of(config, places, folder, max_model_len=4096, trained_tokens=64)
    assert longer["train"].total == before["train"].total
    assert longer["engine"].total > before["engine"].total


def test_generation_with_the_trainers_model_holds_every_row_until_training(folder):
    config = settings("transformers", env={"num_envs": 3, "repeats": 4})
    cache = row(ledger_of(config, folder), "KV cache")
    per_token = ModelShape.of(folder).kv_bytes_per_token(torch.float32)
    assert (cache.bytes, cache.phases) == (12 * 64 * per_token, ("generate",))


@pytest.mark.parametrize("changes, larger", [
    ({"train_model": {"gradient_checkpointing": True}}, False),
    ({"train": {"max_tokens_per_micro_batch": 1024}}, False),
    ({"train": {"gradient_accumulation_steps": 32}}, False),
    ({"train_model": {"compile": True}}, False),
    ({"train_model": {"attn_implementation": "eager"}}, True),
    ({"train_model": {"head": "logits"}}, True),
    ({"train_model": {"head": "chunked"}}, False),
    ({"train_model": {"head_chunk_size": 64}}, False),
    ({"train": {"kl_to_ref_coeff": 0.1}}, True),
    ({"train": {"optim_batch_size": 8}}, False),
    ({"inference_model": {"kv_cache_memory_bytes": GIB}}, True),
])
def test_every_key_that_changes_the_memory_changes_the_ledger(folder, changes, larger):
    big = {"env": {"num_envs": 64, "repeats": 4}, "train": {"total_dialog_turns": 256}}
    merged = {key: {**big.get(key, {}), **changes.get(key, {})} for key in {**big, **changes}}
    before = ledger_of(settings(**big), folder).at("head")
    after = ledger_of(settings(**merged), folder).at("head")
    assert after > before if larger else after < before


def test_rows_that_are_cut_are_trained_as_long_as_that_and_generated_in_full(folder):
    """With environments an engine takes more tokens than ``atropos.seq_len`` lets through."""
    config = settings("transformers", train={"gradient_accumulation_steps": 2})
    whole, cut = (ledger_of(config, folder, trained_tokens=tokens) for tokens in (None, 40))
    assert row(whole, "KV cache") == row(cut, "KV cache")
    assert row(cut, "activations").note.startswith("80 tokens ")
    assert row(whole, "activations").note.startswith("128 tokens ")
    # No row is longer than the engine can make it.
    assert ledger_of(config, folder, trained_tokens=99) == whole


def test_cuda_graphs_are_only_counted_where_they_are_captured(folder, monkeypatch):
    monkeypatch.setattr(device_memory, "kv_cache_bytes", lambda *args, **options: 0)
    totals = [ledger_of(settings(inference_model={"enforce_eager": eager}), folder, device=CUDA,
                        dtype=torch.bfloat16).total for eager in (False, True)]
    assert totals[0] - totals[1] == GIB


def test_reference_and_teacher_are_counted_by_their_own_configurations(folder, larger_folder):
    config = settings(train={"kl_to_ref_coeff": 0.1}, ref_model={"name": larger_folder},
                      distill={"teacher": larger_folder, "topk_coeff": 1.0})
    ledger = ledger_of(config, folder)
    theirs = 4 * ModelShape.of(larger_folder).parameters
    assert row(ledger, "reference").bytes == row(ledger, "teacher").bytes == theirs
    assert "chunked" in row(ledger, "head").note  # distillation cannot be fused
    own = ledger_of(settings(train={"kl_to_ref_coeff": 0.1}), folder)
    assert row(own, "reference").bytes == row(own, "weights").bytes


def test_an_engine_elsewhere_takes_nothing_here(folder):
    config = settings(inference_model={"engine": "server", "url": "http://127.0.0.1:9001"})
    names = {row.name for row in ledger_of(config, folder).rows}
    assert not names & {"KV cache", "generation", "engine"}


@pytest.mark.parametrize("device, inference, held", [
    (CUDA, {}, 0),  # the trainer reads them in the engine's memory, which is not this run's
    (CUDA, {"weight_sync": "reload"}, 1),
    (CPU, {}, 1)])  # of which all memory is counted, the engine's too
def test_weights_that_a_running_engine_lends_take_no_memory_of_a_gpu(
        folder, device, inference, held):
    config = settings(inference_model={"engine": "server", "url": "http://127.0.0.1:9001",
                                       **inference})
    weights = row(ledger_of(config, folder, device=device), "weights")
    assert weights.bytes == held * 4 * ModelShape.of(folder).parameters


@pytest.mark.parametrize("inference, two", [
    ({}, False), ({"engine": "process"}, False), ({"engine": "server"}, False),
    ({"weight_sync": "reload"}, True), ({"engine": "server", "weight_sync": "transfer"}, True),
    ({"engine": "server", "weight_sync": "restart"}, True)])
def test_weights_that_are_copied_are_held_twice(folder, inference, two):
    ledger = ledger_of(settings(inference_model=inference), folder)
    assert ("engine" in {row.name for row in ledger.rows}) == two
    if two:
        assert row(ledger, "engine").bytes == row(ledger, "weights").bytes


placed = partial(settings, schema=AsyncConfig)


def test_each_role_holds_what_is_on_its_device(folder, larger_folder):
    config = placed(train={"kl_to_ref_coeff": 0.1}, ref_model={"name": larger_folder})
    apart = roles_of(config, DevicePlan("cpu", (0,), (1,), ((2,),)), folder)
    beside = roles_of(config, DevicePlan("cpu", (0,), (), ((1,),)), folder)
    parameters, larger = (ModelShape.of(path).parameters * 4 for path in (folder, larger_folder))
    assert row(apart["reference"], "reference").bytes == larger
    assert row(beside["train"], "reference").bytes == larger and "reference" not in beside
    assert {"weights", "moments", "activations"} <= {r.name for r in apart["train"].rows}
    assert not {"KV cache", "generation", "engine", "reference"} & {
        r.name for r in apart["train"].rows}
    assert [r.name for r in apart["engine"].rows] == [
        "weights", "KV cache", "generation", "reserve"]
    assert row(apart["engine"], "weights").bytes == parameters


def test_an_engine_on_its_own_gpu_may_fill_it_and_divides_weights_and_heads(folder, monkeypatch):
    gpu = SimpleNamespace(total_memory=400 << 20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    rows = {"env": {"num_envs": 512, "repeats": 8}, "train": {"total_dialog_turns": 8192}}
    config = placed(**rows, inference_model={"num_devices": 2, "tensor_parallel_size": 2})
    two = roles_of(config, DevicePlan("cuda", (0,), (), ((1, 2),)), folder, device=CUDA,
                   max_model_len=512)["engine"]
    one = roles_of(placed(**rows), DevicePlan("cuda", (0,), (), ((1,),)), folder, device=CUDA,
                   max_model_len=512)["engine"]
    assert row(two, "weights").bytes == row(one, "weights").bytes // 2
    # As the worker asks for it; 1024 rows are the most that an engine takes at a time.
    wanted = kv_cache_bytes(folder, rows=1024, tokens=512, dtype=torch.float32, device=CUDA,
                            alone=True)
    assert row(one, "KV cache").bytes == wanted > 0.4 * gpu.total_memory
    assert row(two, "KV cache").bytes == wanted // 2


def test_transformers_has_all_of_the_model_on_each_device(folder):
    one, two = (roles_of(placed(inference_model={
        "backend": "transformers", "num_devices": 2, "tensor_parallel_size": size}),
        DevicePlan("cuda", (0,), (), ((1,), (2,))), folder)["engine"] for size in (1, 2))
    assert row(two, "weights").bytes == row(one, "weights").bytes
    assert two.total == one.total


def test_a_role_that_does_not_fit_is_named_and_on_a_cpu_all_share_one_memory(folder):
    config, plan = placed(), DevicePlan("cpu", (0,), (), ((1,), (2,)))
    ledgers = roles_of(config, plan, folder)
    together = ledgers["train"].total + 2 * ledgers["engine"].total
    check_roles_fit(ledgers, plan, together)
    with pytest.raises(DoesNotFitError, match="this run needs .*engines .* train "):
        check_roles_fit(ledgers, plan, together - 1)
    on_gpus = replace(plan, kind="cuda")
    greatest = max(ledger.total for ledger in ledgers.values())
    check_roles_fit(ledgers, on_gpus, greatest)
    with pytest.raises(DoesNotFitError, match="(train|engine): a device of it needs"):
        check_roles_fit(ledgers, on_gpus, greatest - 1)


def test_roles_on_one_gpu_must_fit_together_or_the_plan_is_shown(folder):
    config = placed(train={"kl_to_ref_coeff": 0.1})
    plan = DevicePlan("cuda", (0,), (1,), ((0,), (2,)), available=3)
    ledgers = roles_of(config, plan, folder)
    together = ledgers["train"].total + ledgers["engine"].total
    check_roles_fit(ledgers, plan, together)
    asked = []
    with pytest.raises(DoesNotFitError) as error:
        check_roles_fit(ledgers, plan, together - 1, lambda role: asked.append(role) or [])
    assert asked == ["train", "engine"]
    assert "a device of train and engine needs" in str(error.value)
    assert "give each role devices of its own" in str(error.value)
    assert all(line in str(error.value) for line in plan.table())


def test_an_engine_that_shares_its_gpu_leaves_the_rest_of_it_alone(folder, monkeypatch):
    seen = {}
    monkeypatch.setattr(device_memory, "kv_cache_bytes",
                        lambda *args, alone, **options: seen.setdefault("alone", alone) or 5)
    for engines, alone in (((1,),), True), (((0,),), False):
        seen.clear()
        roles_of(placed(), DevicePlan("cuda", (0,), (), engines), folder, device=CUDA)
        assert seen == {"alone": alone}


def test_each_copy_of_the_reference_is_counted(folder):
    config = placed(train={"kl_to_ref_coeff": 0.1})
    one, two = (DevicePlan("cpu", (0,), references, ((3,),)) for references in ((1,), (1, 2)))
    ledgers = roles_of(config, two, folder)
    assert ledgers == roles_of(config, one, folder)  # of a device of each role
    alone = sum(ledger.total for ledger in ledgers.values())
    check_roles_fit(ledgers, one, alone)
    check_roles_fit(ledgers, two, alone + ledgers["reference"].total)
    with pytest.raises(DoesNotFitError, match="references .* engine .* train"):
        check_roles_fit(ledgers, two, alone + ledgers["reference"].total - 1)


KL = {"train": {"kl_to_ref_coeff": 0.1}, "ref_model": {"num_devices": 2}}


def test_a_reference_is_sharded_where_a_whole_copy_fits_no_device(folder, larger_folder,
                                                                  monkeypatch):
    monkeypatch.setattr(device_memory, "kv_cache_bytes", lambda *args, **options: 0)
    plan = DevicePlan("cuda", (0,), (1, 2), ((3,),))

    def ledgers(memory: int, **reference) -> dict:
        config = placed(**KL | {"ref_model": {**KL["ref_model"], **reference}})
        return roles_of(config, plan, folder, device=CUDA, memory=memory)

    whole = ledgers(1 << 40)["reference"]
    assert [r.name for r in whole.rows] == ["reference", "head", "reserve"]
    assert ledgers(whole.total)["reference"] == whole
    part = ledgers(whole.total - 1)["reference"]
    assert [r.name for r in part.rows] == ["reference", "gathered", "head", "reserve"]
    assert row(part, "reference").bytes == row(whole, "reference").bytes // 2
    assert row(part, "reference").note.startswith("1/2 of ")
    shape = ModelShape.of(folder)
    layers = sum(ins * outs for *_, ins, outs in shape.linears)
    assert row(part, "gathered").bytes == 4 * (shape.parameters - layers + layers)  # of two layers
    assert ledgers(1 << 40, sharded=True)["reference"] == part
    assert ledgers(whole.total - 1, sharded=False)["reference"] == whole


def test_on_a_cpu_it_is_sharded_where_copies_do_not_fit_together(folder):
    plan, config = DevicePlan("cpu", (0,), (1, 2), ((3,),)), placed(**KL)
    whole = roles_of(config, plan, folder)
    together = sum(ledger.total for ledger in whole.values()) + whole["reference"].total
    assert roles_of(config, plan, folder, memory=together) == whole
    assert row(roles_of(config, plan, folder, memory=together - 1)["reference"], "gathered").bytes


def test_on_gpus_the_ledger_is_that_of_one_of_several_training_devices(folder, monkeypatch):
    monkeypatch.setattr(device_memory, "kv_cache_bytes", lambda *args, **options: 0)
    config = settings(train_model={"num_devices": 2}, inference_model={"engine": "process"})
    on_gpu = ledger_of(config, folder, device=CUDA, dtype=torch.bfloat16)
    assert row(on_gpu, "weights").note.startswith("1/2 of ")
    # The memory of a CPU is that of all ranks together.
    assert row(ledger_of(config, folder), "weights").note.endswith("the trainer's")


def test_adapters_reach_the_ledger(folder):
    lora = {"enabled": True, "r": 2, "target_modules": ["q_proj"]}
    ledger = ledger_of(settings(train_model={"lora": lora}), folder)
    assert row(ledger, "gradients").bytes == 4 * 2 * 2 * (64 + 64)
    lora["layer_indices"] = [1]
    ledger = ledger_of(settings(train_model={"lora": lora}), folder)
    assert row(ledger, "gradients").bytes == 4 * 2 * (64 + 64)


@pytest.mark.parametrize("inference, slots", [({}, 1), ({"engine": "process"}, 1),
                                              ({"engine": "server"}, 2)])
def test_an_engines_slots_are_as_wide_as_its_rank_in_all_layers(folder, inference, slots):
    """An adapter of rank 9 in one module takes a slot of rank 16 in all of them."""
    lora = {"enabled": True, "r": 9, "target_modules": ["q_proj"]}
    ledger = ledger_of(settings(train_model={"lora": lora}, inference_model=inference), folder)
    every = sum(ModelShape.of(folder).adapter_sizes(LoRA(rank=16)))
    assert row(ledger, "adapter slots").bytes == slots * 4 * every
    own = ledger_of(settings("transformers", train_model={"lora": lora}), folder)
    assert "adapter slots" not in {row.name for row in own.rows}


@pytest.mark.parametrize("lora, message", [
    ({"target_modules": ["qkv"]}, "LoRA targets .'qkv'. are no linear layers"),
    ({"layer_indices": [0, 7]}, r"LoRA layers \[7\] are not among the model's layers 0 to 1")])
def test_adapters_that_the_model_has_no_place_for_are_refused_before_anything_starts(
        folder, lora, message):
    with pytest.raises(ValueError, match=message):
        ledger_of(settings(train_model={"lora": {"enabled": True, **lora}}), folder)


def test_adapters_need_no_second_model_as_reference(folder, larger_folder):
    def names(**changes) -> set[str]:
        config = settings(train={"kl_to_ref_coeff": 0.1},
                          train_model={"lora": {"enabled": True}}, **changes)
        return {row.name for row in ledger_of(config, folder).rows}

    assert "reference" not in names()
    assert "reference" in names(ref_model={"name": larger_folder})


def test_a_micro_batch_has_at_least_a_row_of_prompt_and_response(folder):
    ledger = ledger_of(settings(train={"max_tokens_per_micro_batch": 1}), folder, max_model_len=40)
    assert row(ledger, "activations").note.startswith("40 tokens ")


@given(num_envs=st.integers(1, 6), repeats=st.integers(2, 5), row_tokens=st.integers(30, 80),
       budget=st.one_of(st.none(), st.integers(1, 700)), pieces=st.integers(1, 9),
       maxent=st.booleans())
def test_micro_batches_are_counted_as_they_are_split(num_envs, repeats, row_tokens, budget,
                                                     pieces, maxent):
    split = {"max_tokens_per_micro_batch": budget} if budget else {
        "gradient_accumulation_steps": pieces}
    rows = num_envs * repeats
    objective = {"objective": "maxent_listwise", "aggregation": "prompt"} if maxent else {}
    config = settings(env={"num_envs": num_envs, "repeats": repeats},
                      train={"total_dialog_turns": rows, **split, **objective})
    batch = TensorDict({
        "tokens": {"full": torch.ones(rows, row_tokens, dtype=torch.int64)},
        "masks": {"all_attention_mask": torch.ones(rows, row_tokens, dtype=torch.bool)},
        "group_id": torch.arange(rows) // repeats}, [rows])
    parts = data.split_rows(batch, max_tokens=budget, whole_groups=maxent,
                            num_micro_batches=None if budget else pieces)
    largest = max(part[data.TOKENS].numel() for part in parts)
    counted = device_memory._micro_batch_tokens(config, row_tokens)
    if budget is None:
        assert counted == largest
    else:  # which rows of other lengths may fill
        assert largest <= counted <= max(budget, row_tokens * (repeats if maxent else 1))


# -- the device -----------------------------------------------------------------------------------


def files(root: Path, contents: dict[str, str]) -> Path:
    for name, text in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_the_ram_is_at_most_what_the_machine_has_and_a_container_may_use(monkeypatch):
    physical = capacity(CPU)
    monkeypatch.setattr(device_memory, "cgroup_limits", lambda: [physical // 2, 4 * physical])
    assert capacity(CPU) == physical // 2


@pytest.mark.parametrize("contents, limits", [
    ({"proc/self/cgroup": "0::/job/task\n", "sys/fs/cgroup/job/task/memory.max": "max\n",
      "sys/fs/cgroup/job/memory.max": "1000\n", "sys/fs/cgroup/memory.max": "2000\n"},
     [1000, 2000]),
    ({"proc/self/cgroup": "4:memory:/box\n3:cpu:/box\n",
      "sys/fs/cgroup/memory/box/memory.limit_in_bytes": "500\n",
      "sys/fs/cgroup/cpu/box/memory.limit_in_bytes": "1\n"}, [500]),
    ({"proc/self/cgroup": "0::/\n", "memory.max": "1\n"}, []),
    ({}, []),
], ids=["version 2", "version 1", "no limit", "no control groups"])
def test_control_groups_limit_the_memory(tmp_path, contents, limits):
    assert cgroup_limits(files(tmp_path, contents)) == limits


def test_beside_a_running_engine_a_gpu_has_what_that_has_left(monkeypatch):
    monkeypatch.setattr(device_memory, "capacity", lambda device: 80)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (30, 80))
    own = settings()
    attached = settings(inference_model={"engine": "server", "url": "http://127.0.0.1:9001"})
    assert [available(config, device) for config in (own, attached) for device in (CUDA, CPU)] == [
        80, 80, 30, 80]


@pytest.mark.gpu
def test_the_capacity_of_a_gpu_is_all_of_its_memory():
    assert capacity(CUDA) == torch.cuda.mem_get_info(CUDA)[1]
