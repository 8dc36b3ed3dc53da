"""Training on two ranks is training in one process: gradients, weights, metrics, checkpoints.

All ranks are started once, by parallel_ranks.py; test/gpu/test_parallel.py does so on GPUs.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from grpo import data
from grpo.objectives import GRPOLoss
from grpo.training.parallel import ShardedAdamW, without_loss
from grpo.training.ranks import Ranks, divide_rows

DEADLINE = 240.0  # seconds for all ranks and all cases
RANKS = 2
HALF = ("bfloat16", "frozen", "lora_bfloat16")
EXACT = [name for name in (
    "token", "sequence", "prompt", "dr_grpo", "kl_untied", "gspo", "listwise", "logits", "chunked",
    "packed", "checkpointing", "scored", "errors", "all_errors", "one_row_a_step", "long_row",
    "accumulated", "reduce_each", "gather_once", "float64", "lora", "warmed_up", "warmed_up_untied",
    "warmed_up_lora")]


def run_ranks(device: str, folder: Path) -> list[dict]:
    """What each rank found."""
    script = Path(__file__).with_name("parallel_ranks.py")
    done = subprocess.run(
        [sys.executable, script, device, str(RANKS), folder], timeout=DEADLINE, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
             # Once a rank was ended by glibc, whose message does not say where.
             "PYTHONFAULTHANDLER": "1"})
    assert done.returncode == 0, done.stdout[-6000:]
    return [torch.load(folder / f"results_{rank}.pt", weights_only=False) for rank in range(RANKS)]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run_ranks("cpu", tmp_path_factory.mktemp("ranks"))


@pytest.fixture
def cases(results):
    return results[0]["cases"]


def flat(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.double().flatten() for tensor in tensors.values()])


def error(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Norm of the difference over the norm of what was expected."""
    assert found.keys() == expected.keys()
    difference = (flat(found) - flat(expected)).norm()
    return (difference / flat(expected).norm().clamp(min=1e-30)).item()


def pair(cases, name: str) -> tuple[dict, dict]:
    if name not in cases:
        pytest.skip("needs the peft package")
    return cases[name]["together"], cases[name]["alone"]


# -- the same training -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXACT)
def test_gradients_are_those_of_one_process(name, cases):
    together, alone = pair(cases, name)
    assert len(together["gradients"]) == len(alone["gradients"])
    for found, expected in zip(together["gradients"], alone["gradients"], strict=True):
        assert error(found, expected) <= (1e-12 if name == "float64" else 1e-6)
    norms = [flat(expected).norm() for expected in alone["gradients"]]
    assert bool(norms) == (name != "all_errors") and max(norms, default=1.0) > 0.1


@pytest.mark.parametrize("name", EXACT)
def test_updated_weights_are_those_of_one_process(name, cases):
    together, alone = pair(cases, name)
    assert error(together["masters"], alone["masters"]) <= 1e-7


@pytest.mark.parametrize("name", HALF)
def test_half_precision_agrees_within_its_rounding(name, cases):
    together, alone = pair(cases, name)
    for found, expected in zip(together["gradients"], alone["gradients"], strict=True):
        assert error(found, expected) < 0.01
        assert {grad.dtype for grad in found.values()} == {torch.float32}
    assert error(together["masters"], alone["masters"]) < 1e-4
    assert {master.dtype for master in together["masters"].values()} == {torch.float32}


@pytest.mark.parametrize("name", [*EXACT, *HALF])
def test_metrics_are_those_of_all_rows_and_the_same_on_every_rank(name, results):
    together, alone = pair(results[0]["cases"], name)
    tolerance = {"rel": 0.02, "abs": 2e-3} if name in HALF else {"rel": 1e-5, "abs": 2e-6}
    assert together["metrics"] == pytest.approx(alone["metrics"], **tolerance)
    for other in results[1:]:
        assert other["cases"][name]["together"]["metrics"] == together["metrics"]


@pytest.mark.parametrize("name", ["token", "prompt", "bfloat16", "frozen", "lora", "lora_bfloat16"])
def test_engines_are_given_the_names_order_and_dtypes_of_one_process(name, cases):
    together, alone = pair(cases, name)
    assert list(together["params"]) == list(alone["params"])
    for key, tensor in together["params"].items():
        assert tensor.dtype == alone["params"][key].dtype, key
        assert tensor.shape == alone["params"][key].shape
    rounded = {key: master.to(together["params"][key].dtype)
               for key, master in together["masters"].items()}
    for key, tensor in rounded.items():
        assert torch.equal(together["params"][key], tensor), key


def test_tensors_that_are_gathered_together_are_those_gathered_alone(results):
    for of_rank in results:
        found = of_rank["gathering"]
        assert all(same for same, _ in found.values()) and len(found) == 6
        for dtype in ("torch.float32", "torch.bfloat16"):
            one, some, few = (found[f"{dtype} {limit}"][1] for limit in (1, 2000, 64 << 20))
            assert 20 < one and few < some < one / 2
    assert few <= 3, "frozen ones that lie between trained ones need a message of their own"


@pytest.mark.parametrize(("name", "embeddings"), [("sequence", 1), ("token", 2)])
def test_a_tied_embedding_stays_one_parameter(name, embeddings, cases):
    together, alone = pair(cases, name)
    assert together["embeddings"] == alone["embeddings"] == embeddings


def test_each_rank_holds_its_slices_of_parameters_and_moments(results):
    for name in ("token", "sequence"):
        ours = [found["cases"][name]["together"] for found in results]
        alone = results[0]["cases"][name]["alone"]
        for key in ("own_numbers", "moments"):
            assert sum(rank[key] for rank in ours) == alone[key]
            assert max(rank[key] for rank in ours) < 0.55 * alone[key]


# -- the work of a rank ----------------------------------------------------------------------------


def test_ranks_make_the_same_number_of_passes(results):
    for name in results[0]["cases"]:
        assert len({found["cases"][name]["together"]["passes"] for found in results}) == 1, name
    passes = {name: case["together"]["passes"] for name, case in results[0]["cases"].items()}
    assert passes["errors"] == 4  # eight pieces of one row, on two ranks
    assert passes["one_row_a_step"] == 2  # of each step, one of them without a row


def test_accumulation_adds_gradients_up_over_ranks_once_a_step(cases):
    groups = 3  # two layers and the rest
    traffic = {name: pair(cases, name)[0]["traffic"]
               for name in ("accumulated", "reduce_each", "gather_once")}

    def count(name: str, kind: str) -> int:
        return sum(n for op, n in traffic[name].items()
                   if op in {"reduce": ("reduce_scatter_base", "reduce_scatter_tensor"),
                             "gather": ("allgather_base", "all_gather_into_tensor")}[kind])

    assert {name: count(name, "reduce") for name in traffic} == {
        "accumulated": groups, "reduce_each": 3 * groups, "gather_once": groups}
    # Layers are gathered forward and backward, the rest stays in between.
    assert {name: count(name, "gather") for name in traffic} == {
        "accumulated": 3 * (groups + 2), "reduce_each": 3 * (groups + 2), "gather_once": groups}


def test_scores_of_divided_rows_are_those_of_one_process(results):
    for found in results:
        scoring = found["scoring"]
        torch.testing.assert_close(scoring["together"], scoring["alone"], atol=2e-6, rtol=1e-6)
        assert scoring["together"].count_nonzero() > 20
        # Whoever asks for the parameters afterwards must not get the gathered ones.
        assert scoring["all_slices"]
        for part, whole in scoring["reference"]:
            torch.testing.assert_close(part, whole, atol=1e-6, rtol=1e-6)
            assert part.min() < -1


@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=20), parts=st.integers(1, 5),
       whole_groups=st.booleans(), seed=st.integers(0, 3))
def test_rows_are_dealt_once_each_in_whole_groups_and_evenly(lengths, parts, whole_groups, seed):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor(lengths)
    groups = torch.randint(0, 5, (len(lengths),), generator=generator)
    batch = TensorDict({"masks": {"all_attention_mask": torch.arange(50) < lengths[:, None]},
                        "group_id": groups}, [len(lengths)])
    shares = divide_rows(batch, parts, whole_groups=whole_groups)
    assert len(shares) == parts
    assert torch.cat(shares).sort().values.tolist() == list(range(len(lengths)))
    units = lengths
    if whole_groups:
        owners = [set(groups[share].tolist()) for share in shares]
        assert sum(map(len, owners)) == len(set().union(*owners))
        units = torch.zeros(5, dtype=torch.int64).index_add(0, groups, lengths)
    # No rank is ahead of another by more than one unit.
    tokens = [int(lengths[share].sum()) for share in shares]
    assert max(tokens) - min(tokens) <= units.max()


def test_a_row_without_loss_has_no_gradient_and_counts_for_nothing(make_model, make_batch):
    model = make_model()
    loss = GRPOLoss(model, kl_to_ref_coeff=0.1, entropy_coeff=0.1, aggregation="prompt")
    batch = make_batch(model)
    row = without_loss(batch)
    assert row.batch_size == (1,) and int(data.lengths(row)) == int(data.lengths(batch).min())
    out = loss(row, normalizer=loss.normalizer(batch))
    sum(out[key] for key in loss.out_keys).backward()
    assert all(param.grad is not None and not param.grad.any() for param in model.parameters())
    assert out["token_stats"].batch_size == (0,)
    assert batch[data.ASSISTANT_MASK].any(-1).all()  # the batch itself is as it was


def test_without_its_adapters_a_sharded_model_is_the_one_beneath_and_still_learns(results):
    if "adapters" not in results[0]:
        pytest.skip("needs the peft package")
    for found in results:
        torch.testing.assert_close(found["adapters"]["without"], found["adapters"]["plain"],
                                   atol=2e-6, rtol=1e-6)
    learned, = results[0]["adapters"]["gradients"]
    expected, = pair(results[0]["cases"], "lora")[1]["gradients"]
    assert error(learned, expected) <= 1e-6


def test_the_leading_rank_alone_can_ask_for_scores_and_for_why_an_engine_disagrees(results):
    found = results[0]["led"]
    torch.testing.assert_close(found["filled"], found["known"], atol=2e-6, rtol=1e-6)
    assert "these parameters differ: lm_head.weight" in found["complaint"]
    assert "Likely cause: a" in found["complaint"]


# -- checkpoints -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "adapters"])
@pytest.mark.parametrize("way", ["one to all", "all to one"])
def test_a_checkpoint_goes_on_at_another_number_of_ranks(way, dtype, results):
    if dtype not in results[0]["checkpoints"]:
        pytest.skip("needs the peft package")
    found = results[0]["checkpoints"][dtype][way]
    saved, loaded = found["saved"], found["loaded"]
    assert saved["steps"] == loaded["steps"] == 2
    for kind in ("params", "masters"):
        assert saved[kind].keys() == loaded[kind].keys()
        for name, tensor in saved[kind].items():
            assert loaded[kind][name].dtype == tensor.dtype
            assert torch.equal(loaded[kind][name], tensor), name
    assert len(saved["moments"]) == 3 * len(saved["masters"])
    assert all(map(torch.equal, saved["moments"], loaded["moments"]))
    assert found["dtype"] == (None if dtype == "adapters" else dtype)
    onward, resumed = found["onward"]["masters"], found["resumed"]["masters"]
    assert error(saved["masters"], onward) > 1e-3
    assert error(resumed, onward) < (1e-8 if dtype == "float32" else 1e-4)


# -- exchanges and refusals ------------------------------------------------------------------------


def test_rank_0s_rollout_is_shared_and_the_rows_of_all_are_joined(results):
    for found in results:
        exchanges = found["exchanges"]
        assert exchanges["greatest"] == 10 * (RANKS - 1)
        for name, rows in (("shared", exchanges["rollout"]), ("joined", exchanges["rollout"][:3])):
            got = exchanges[name]
            assert set(got.keys(True, True)) == set(rows.keys(True, True))
            assert got.batch_size == rows.batch_size
            for key, value in rows.items(True, True):
                assert got[key].dtype == value.dtype
                assert torch.equal(got[key], value), key


@pytest.mark.parametrize("name", ["adamw_8bit", "adafactor", "adamw_cpu"])
def test_other_optimizers_do_not_know_slices(name):
    with pytest.raises(ValueError, match=f"optimizer.name={name} does not know the slices"):
        ShardedAdamW(torch.nn.Linear(2, 2), name=name)


@pytest.mark.parametrize(("what", "message"), [
    ("twice", "Qwen2ForCausalLM is sharded already; call shard_model once"),
    ("unequal models", "the ranks have different tensors, in model.embed_tokens.weight, "),
    ("unsharded loss", r"the loss's model is not sharded; call shard_model\(loss.scorer"),
    ("unsharded optimizer", "is not sharded; call shard_model before building its optimizer"),
    ("option", "gather='never' is unknown; use one of .'layer', 'step'"),
    ("dtypes", "trained parameters have dtypes .*bfloat16.*float32.*load the model in one"),
    ("unequal rollouts", "the ranks have different tensors, in advantage; .*Ranks.share"),
    ("infinite", "FloatingPointError: the gradient norm is .*; the weights are unchanged"),
    ("masters", "1 float32 masters, this run 0: .*train_model.torch_dtype"),
])
def test_what_cannot_work_is_refused_on_every_rank(what, message, results):
    for found in results:
        assert re.search(message, found["refusals"][what]), found["refusals"][what]
        assert found["refusals"]["unchanged"] == "True"


def test_ranks_that_do_not_come_are_an_error_at_the_deadline(tmp_path):
    # A process has one group of all ranks, and this one's may be that of an engine's.
    alone = f"""
import torch
from grpo.training.ranks import Ranks
try:
    Ranks.join("cpu", rank=0, count=2, address="file://{tmp_path}/meeting", timeout=0.5)
except RuntimeError as error:
    print(error, torch.distributed.is_initialized())
"""
    done = subprocess.run([sys.executable, "-c", alone], timeout=DEADLINE, text=True,
                          capture_output=True)
    assert re.search(r"^rank 0 of 2 could not meet the others at file:.*; see that all 2 are "
                     r"started within timeout=0.5 seconds False$", done.stdout, re.DOTALL), done


@pytest.mark.parametrize(("options", "message"), [
    ({"rank": 2, "count": 2}, r"rank=2 must be between 0 and count - 1 = 1"),
    ({"rank": 0, "count": 1, "timeout": 0}, "timeout=0 must be positive"),
    ({"count": 1}, r"\$RANK is not set; start the ranks with torchrun, or pass rank and count"),
])
def test_ranks_need_a_number_each(options, message, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match=message):
        Ranks.join("cpu", **options)
