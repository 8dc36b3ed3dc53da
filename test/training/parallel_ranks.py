"""What test_parallel.py and the GPU's test look at, computed by real ranks and by one process.

    python parallel_ranks.py DEVICE COUNT FOLDER

Starts COUNT ranks on DEVICE ("cpu" or "cuda"). Each case is run by all of them and by rank 0 alone;
rank 0 writes what both found to FOLDER/results.pt.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch.multiprocessing
import transformers
from tensordict import TensorDict
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen2Config, Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from grpo import data  # noqa: E402
from grpo.atropos.recompute import RecomputeLogProbs  # noqa: E402
from grpo.objectives import GRPOLoss  # noqa: E402
from grpo.objectives.maxent import MaxEntWeights  # noqa: E402
from grpo.objectives.scorer import TokenScorer  # noqa: E402
from grpo.policies.base import Sampling  # noqa: E402
from grpo.policies.scoring import (  # noqa: E402
    ProximalScorer,
    ReferenceScorer,
    score_rollout,
)
from grpo.policies.transformers import TransformersPolicy  # noqa: E402
from grpo.training.checkpoint import list_checkpoints, save_checkpoint  # noqa: E402
from grpo.training.learner import Learner  # noqa: E402
from grpo.training.optim import MasterAdamW  # noqa: E402
from grpo.training.parallel import (  # noqa: E402
    ParallelLearner,
    ShardedAdamW,
    ShardedReference,
    score_divided,
    shard_model,
)
from grpo.training.ranks import Ranks  # noqa: E402
from grpo.training.team import Leader, LedLearner, obey  # noqa: E402
from grpo.weights import gather  # noqa: E402
from grpo.weights.adapters import adapters_disabled, load_adapter, make_lora  # noqa: E402
from grpo.weights.canary import Canary, StaleWeightsError  # noqa: E402
from grpo.weights.gather import TrainerRanks  # noqa: E402

ROWS, PROMPT, RESPONSE = 8, 3, 9
# Large enough that a step is about proportional to the gradient, not to its sign.
OPTIMIZER = {"lr": 0.05, "eps": 1.0, "clip_grad_norm": 0.5, "weight_decay": 0.01}

# Without clipping, which in half precision lets a token in on one side and not on the other.
SMOOTH = {"loss": {"clip_epsilon": (0.99, 100.0)}}

#: Name -> options of the model, the loss, the learner, the rollout.
CASES = {
    "token": {"model": {"tie": False}},
    "sequence": {"loss": {"aggregation": "sequence"}},
    "prompt": {"loss": {"aggregation": "prompt", "kl_to_ref_coeff": 0.1, "entropy_coeff": 0.01},
               "learner": {"max_tokens_per_micro_batch": 24, "rows_per_step": 4}},
    "dr_grpo": {"loss": {"aggregation": "dr_grpo", "constant_length": RESPONSE},
                "model": {"tie": False}, "learner": {"num_micro_batches": 3}},
    "kl_untied": {"model": {"tie": False}, "learner": {"max_tokens_per_micro_batch": 16},
                  "loss": {"kl_to_ref_coeff": 0.1, "kl_to_inference_coeff": 0.1}},
    "gspo": {"loss": {"objective": "gspo", "aggregation": "sequence", "head": "fused"},
             "learner": {"num_micro_batches": 2}},
    "listwise": {"loss": {"objective": "maxent_listwise", "aggregation": "prompt"},
                 "learner": {"max_tokens_per_micro_batch": 30}},
    "logits": {"loss": {"head": "logits"}},
    "chunked": {"loss": {"head": "chunked", "head_chunk_size": 4}},
    "packed": {"loss": {"packing": True}, "learner": {"num_micro_batches": 2}},
    "checkpointing": {"model": {"checkpointing": True}, "learner": {"num_micro_batches": 2}},
    "scored": {"loss": {"proximal": "scored", "high_entropy_only": True}, "scored": True,
               "learner": {"rows_per_step": 4}},
    "errors": {"errors": (1, 5), "learner": {"num_micro_batches": 8}},
    "all_errors": {"errors": tuple(range(ROWS))},
    "one_row_a_step": {"rows": 2, "learner": {"rows_per_step": 1}},
    "long_row": {"long": True, "learner": {"max_tokens_per_micro_batch": 12}},
    "accumulated": {"learner": {"num_micro_batches": 3}, "traffic": True},
    "reduce_each": {"ranks": {"reduce": "micro_batch"}, "learner": {"num_micro_batches": 3},
                    "traffic": True},
    "gather_once": {"ranks": {"gather": "step"}, "learner": {"num_micro_batches": 3},
                    "traffic": True},
    "warmed_up": {"warm_up": True},
    "warmed_up_untied": {"warm_up": True, "model": {"tie": False},
                         "loss": {"packing": True}, "learner": {"num_micro_batches": 2}},
    "warmed_up_lora": {"warm_up": True, "model": {"lora": True}},
    "float64": {"model": {"dtype": torch.float64, "tie": False},
                "loss": {"aggregation": "prompt", "kl_to_ref_coeff": 0.1, "entropy_coeff": 0.01},
                "learner": {"max_tokens_per_micro_batch": 24}},
    "bfloat16": {"model": {"dtype": torch.bfloat16}, "learner": {"num_micro_batches": 2}, **SMOOTH},
    "frozen": {"model": {"dtype": torch.bfloat16, "frozen": True}, **SMOOTH},
    "lora": {"model": {"lora": True}, "learner": {"num_micro_batches": 2}},
    "lora_bfloat16": {"model": {"lora": True, "dtype": torch.bfloat16}, **SMOOTH},
}
#: Name -> options of the model that is trained, saved and trained on.
CHECKPOINTS = {"float32": {}, "bfloat16": {"dtype": torch.bfloat16},
               "adapters": {"dtype": torch.bfloat16, "lora": True}}
WITH_PEFT = importlib.util.find_spec("peft") is not None
if not WITH_PEFT:
    del CASES["lora"], CASES["lora_bfloat16"], CASES["warmed_up_lora"], CHECKPOINTS["adapters"]


def make_model(device, *, tie: bool = True, dtype: torch.dtype = torch.float32,
               checkpointing: bool = False, frozen: bool = False, lora: bool = False,
               seed: int = 0):
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(Qwen2Config(
        attn_implementation="eager",  # one kernel for all shapes
        vocab_size=23, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64,
        tie_word_embeddings=tie, pad_token_id=0, eos_token_id=1, bos_token_id=None,
        initializer_range=0.3)).to(device, dtype).train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if frozen:
        model.model.embed_tokens.requires_grad_(False)
        model.model.layers[0].mlp.requires_grad_(False)
    if lora:
        make_lora(model, r=2)
        with torch.no_grad():
            for name, param in sorted(model.named_parameters()):
                if "lora_B" in name:  # they begin as zeros, and A then has no gradient
                    param.normal_(std=0.1)
    return model


def make_rollout(device, *, errors: tuple[int, ...] = (), long: bool = False) -> TensorDict:
    """Eight rows of different lengths and advantages in four mixed groups."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(1, PROMPT + 1, (ROWS,), generator=generator)
    sizes = torch.randint(1, 5 if long else RESPONSE + 1, (ROWS,), generator=generator)
    if long:
        sizes[0] = RESPONSE
    rollout = data.join_prompt_response(
        torch.randint(2, 23, (ROWS, PROMPT), generator=generator),
        torch.arange(PROMPT) < prompts[:, None],
        torch.randint(2, 23, (ROWS, RESPONSE), generator=generator),
        torch.arange(RESPONSE) < sizes[:, None],
        -3.0 + 0.3 * torch.randn(ROWS, RESPONSE, generator=generator), pad_token_id=0)
    rollout[data.ADVANTAGE] = torch.randn(ROWS, 1, generator=generator)
    noise = 0.2 * torch.randn(rollout[data.LOG_PROBS].shape, generator=generator)
    rollout[data.REF_LOG_PROBS] = (rollout[data.LOG_PROBS] + noise) * rollout[data.ASSISTANT_MASK]
    rollout[data.REWARD] = torch.randn(ROWS, 1, generator=generator)
    rollout[data.REWARD_ERROR] = torch.tensor([[row in errors] for row in range(ROWS)])
    rollout[data.GROUP_ID] = torch.tensor([13, 11, 13, 11, 10, 10, 12, 12])
    return MaxEntWeights(tau=0.5)(rollout).to(device)


def make_learner(model, ranks: Ranks | None, case: dict) -> Learner:
    """On all ranks, or in this process alone."""
    loss = GRPOLoss(model, **case.get("loss", {}))
    options = {"rows_per_step": ROWS, **case.get("learner", {})}
    if not {"num_micro_batches", "max_tokens_per_micro_batch"} & set(options):
        options["num_micro_batches"] = 1
    if case.get("scored"):
        options["proximal"] = ProximalScorer(loss.scorer, max_tokens=20, entropy_fraction=0.4)
    if ranks is None:
        return Learner(loss, MasterAdamW(model.parameters(), **OPTIMIZER), **options)
    shard_model(loss.scorer, ranks)
    return ParallelLearner(loss, ShardedAdamW(model, **OPTIMIZER), ranks=ranks,
                           **case.get("ranks", {}), **options)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu().clone()


def named(model, tensors) -> dict[str, torch.Tensor]:
    names = [name for name, param in model.named_parameters() if param.requires_grad]
    return {name: whole(tensor) for name, tensor in zip(names, tensors, strict=True)}


def masters_of(learner: Learner) -> dict[str, torch.Tensor]:
    return named(learner.loss.actor_network, learner.optimizer.masters)


def record_gradients(learner: Learner) -> list[dict[str, torch.Tensor]]:
    """The gradients before each optimizer step from now on."""
    optimizer, steps, step = learner.optimizer, [], learner.optimizer.step

    def recording() -> float:
        steps.append(named(learner.loss.actor_network, [m.grad for m in optimizer.masters]))
        return step()

    optimizer.step = recording
    return steps


class Traffic(TorchDispatchMode):
    """Count exchanges between ranks by the name of the operation."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.counts[func._opname.strip("_")] += 1
        return func(*args, **(kwargs or {}))


def run_case(case: dict, device, ranks: Ranks | None) -> dict:
    model = make_model(device, **case.get("model", {}))
    learner = make_learner(model, ranks, case)
    gradients = record_gradients(learner)
    rollout = make_rollout(device, errors=case.get("errors", ()), long=case.get("long", False))
    passes, forward = [], learner.loss.forward
    learner.loss.forward = lambda *args, **kwargs: (passes.append(1), forward(*args, **kwargs))[1]
    if case.get("warm_up") and ranks is not None:
        learner.warm_up(rollout[data.TOKENS], rollout[data.ASSISTANT_MASK])
    with Traffic() if case.get("traffic") else nullcontext(Traffic()) as traffic:
        metrics = learner.update(rollout[: case.get("rows", ROWS)], iteration=0)
    return {
        "gradients": gradients, "metrics": metrics, "passes": len(passes),
        "traffic": traffic.counts, "masters": masters_of(learner),
        "params": dict(published(model)), "embeddings": len({id(param) for param in (
            model.lm_head.weight, model.model.embed_tokens.weight)}),
        "own_numbers": sum(map(local_size, model.parameters())),
        "moments": sum(local_size(value) for state in learner.optimizer.adamw.state.values()
                       for name, value in state.items() if name != "step")}


def local_size(tensor: torch.Tensor) -> int:
    return tensor.to_local().numel() if isinstance(tensor, DTensor) else tensor.numel()


def published(model) -> Iterator[tuple[str, torch.Tensor]]:
    """What engines are given: names in order, whole tensors in their dtypes."""
    for name, tensor in TrainerRanks(model).whole(model.named_parameters()):
        yield name, tensor.cpu().clone()


# -- checkpoints -----------------------------------------------------------------------------------


class NoTokenizer:
    def save_pretrained(self, folder) -> None:
        """Models are all that these checkpoints are about."""


def save(learner: Learner, folder: Path):
    return save_checkpoint(folder, 1, model=learner.loss.actor_network, tokenizer=NoTokenizer(),
                           state={"optimizer": learner.optimizer.state_dict()}, config={})


def load(checkpoint, device, ranks: Ranks | None, options: dict) -> Learner:
    if options.get("lora"):
        model = make_model(device, **options)
        load_adapter(model, checkpoint.adapter_folder)
    else:
        model = Qwen2ForCausalLM.from_pretrained(checkpoint.model_folder, **options)
    learner = make_learner(model.to(device).train(), ranks, SMOOTH)
    learner.optimizer.load_state_dict(checkpoint.state()["optimizer"])
    return learner


def moments_of(learner: Learner) -> list[torch.Tensor]:
    state = learner.optimizer.adamw.state_dict()["state"]
    return [whole(state[i][name]) for i in sorted(state) for name in sorted(state[i])]


def content(learner: Learner, ranks: Ranks | None) -> dict:
    model = learner.loss.actor_network
    return {"params": dict(published(model)), "masters": masters_of(learner),
            "moments": moments_of(learner), "steps": learner.optimizer.steps}


def run_checkpoints(ranks: Ranks, folder: Path, options: dict) -> dict:
    """Train, save, load on the other number of ranks, go on; and the same without a stop."""
    device, found, rollout = ranks.device, {}, make_rollout(ranks.device)
    sides = {"one": None, "all": ranks}
    for start, then in (("one", "all"), ("all", "one")):
        path = folder / start
        if start == "all" or ranks.leads:
            learner = make_learner(make_model(device, **options), sides[start], SMOOTH)
            for iteration in range(2):
                learner.update(rollout, iteration=iteration)
            saved = content(learner, sides[start])
            save(learner, path)
            learner.update(rollout, iteration=2)
            onward = content(learner, sides[start])
        ranks.greatest(0)  # nobody reads before rank 0 has written
        if then == "all" or ranks.leads:
            checkpoint = list_checkpoints(path)[-1]
            learner = load(checkpoint, device, sides[then], options)
            loaded = content(learner, sides[then])
            learner.update(rollout, iteration=2)
            resumed = content(learner, sides[then])
        if ranks.leads:
            config = checkpoint.model_folder / "config.json"  # adapters have none
            found[f"{start} to {then}"] = {
                "saved": saved, "loaded": loaded, "onward": onward, "resumed": resumed,
                "dtype": json.loads(config.read_text())["dtype"] if config.exists() else None}
    return found


# -- refusals and small things ---------------------------------------------------------------------


def error_of(function, *args, **kwargs) -> str:
    try:
        function(*args, **kwargs)
    except (ValueError, FloatingPointError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def run_refusals(ranks: Ranks) -> dict[str, str]:
    device = ranks.device
    case = {"learner": {"num_micro_batches": 1}}
    learner = make_learner(make_model(device), ranks, case)
    rollout = make_rollout(device)
    before = masters_of(learner)
    other = rollout.clone()
    other[data.ADVANTAGE] += ranks.rank
    infinite = rollout.clone()
    infinite[data.ADVANTAGE][0] = torch.inf
    loss = GRPOLoss(make_model(device))
    mixed = make_model(device)
    mixed.model.norm.bfloat16()
    refused = {
        "twice": error_of(shard_model, learner.loss.scorer, ranks),
        "unequal models": error_of(shard_model, GRPOLoss(make_model(device, seed=ranks.rank)
                                                         ).scorer, ranks),
        "unsharded loss": error_of(ParallelLearner, loss, learner.optimizer, ranks=ranks,
                                   rows_per_step=8),
        "unsharded optimizer": error_of(ShardedAdamW, make_model(device), lr=0.1),
        "option": error_of(ParallelLearner, loss, learner.optimizer, ranks=ranks,
                           rows_per_step=8, gather="never"),
        "dtypes": error_of(shard_model, GRPOLoss(mixed).scorer, ranks),
        "unequal rollouts": error_of(learner.update, other, iteration=0),
        "infinite": error_of(learner.update, infinite, iteration=0),
        "masters": error_of(learner.optimizer.load_state_dict, {"masters": [torch.zeros(1)]}),
    }
    after = masters_of(learner)
    refused["unchanged"] = str(all(torch.equal(before[name], after[name]) for name in before))
    return refused


def run_scoring(ranks: Ranks) -> dict:
    """Scores of a sharded model with divided rows, and of a whole one; and what that leaves."""
    rollout, model = make_rollout(ranks.device, long=True), make_model(ranks.device)
    alone = score_rollout(TokenScorer(model), rollout, max_tokens=12)
    scorer = TokenScorer(model)
    shard_model(scorer, ranks)
    together = score_divided(scorer, rollout, ranks, max_tokens=12)
    return {"alone": torch.stack(alone).cpu(), "together": torch.stack(together).cpu(),
            "all_slices": all(isinstance(param, DTensor) for param in model.parameters()),
            "reference": _reference_scores(ranks, rollout)}


def _reference_scores(ranks: Ranks, rollout: TensorDict) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of a reference that is sharded, and of a whole one: of all rows and of fewer than ranks."""
    options = {"temperature": 0.7, "max_tokens": 12}
    whole = ReferenceScorer(make_model(ranks.device), **options)
    part = ShardedReference(make_model(torch.device("cpu")), ranks, **options)
    return [tuple(score(rows.clone())[data.REF_LOG_PROBS].cpu() for score in (part, whole))
            for rows in (rollout, rollout[:1], rollout[5:8])]


def run_adapters(ranks: Ranks) -> dict:
    """What a sharded model computes without its adapters, and their gradients after that."""
    case, rollout = CASES["lora"], make_rollout(ranks.device)
    learner = make_learner(make_model(ranks.device, **case["model"]), ranks, case)
    with adapters_disabled(learner.loss.actor_network):  # before anything else is computed
        without, _ = score_divided(learner.loss.scorer, rollout, ranks, max_tokens=12)
    plain, _ = score_rollout(TokenScorer(make_model(ranks.device)), rollout, max_tokens=12)
    gradients = record_gradients(learner)
    learner.update(rollout, iteration=0)
    return {"without": without.cpu(), "plain": plain.cpu(), "gradients": gradients}


def run_led(ranks: Ranks) -> dict:
    """What the leading rank asks of all: unknown log-probs, and why an engine disagrees."""
    rollout, case = make_rollout(ranks.device), CASES["token"]
    learner = make_learner(make_model(ranks.device), ranks, case)
    if not ranks.leads:
        obey(learner)
        return {}
    leader = Leader(ranks)
    led = LedLearner(learner, leader)
    unknown = rollout.clone()
    unknown[data.LOG_PROBS][1:3] = torch.nan
    known, _ = score_rollout(TokenScorer(make_model(ranks.device)), rollout, max_tokens=12)
    recompute = RecomputeLogProbs(led.scorer, max_tokens=12)
    other = make_model(ranks.device)
    with torch.no_grad():
        for param in other.parameters():
            param.mul_(1.5)
    policy = TransformersPolicy(other, Sampling(max_tokens=3), pad_token_id=0, eos_token_ids=(),
                                max_model_len=32)
    weights = SimpleNamespace(pending=False, version=3, unshared=list,
                              differing=lambda: ["lm_head.weight"])
    complaint = None
    try:
        Canary(policy, led.scorer, weights, prompts=[[5, 6, 7], [8]]).check()
    except StaleWeightsError as error:
        complaint = str(error)
    found = {"filled": recompute(unknown)[data.LOG_PROBS][1:3].cpu(), "known": known[1:3].cpu(),
             "complaint": complaint}
    with leader.together("stop"):
        return found


def run_gathering(ranks: Ranks) -> dict[str, tuple[bool, int]]:
    """Whether tensors that are gathered together are those gathered alone, to the bit, and in how
    many messages; by the bytes of a message."""
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        scorer = TokenScorer(model := make_model(ranks.device, dtype=dtype, frozen=True))
        shard_model(scorer, ranks)
        params = dict(model.named_parameters())
        with torch.no_grad():
            alone = {name: (param.to(dtype) if param.requires_grad else param).full_tensor()
                     for name, param in params.items()}
        for limit in (1, 2000, 64 << 20):
            with mock.patch.object(gather, "TOGETHER_BYTES", limit), mock.patch.object(
                    gather, "_all_gather", wraps=gather._all_gather) as sent:
                together = dict(TrainerRanks(model).whole(params.items()))
            same = list(together) == list(alone) and all(
                torch.equal(together[name], whole) and together[name].dtype == whole.dtype
                and together[name].is_contiguous() for name, whole in alone.items())
            found[f"{dtype} {limit}"] = same, sent.call_count
    return found


def run_exchanges(ranks: Ranks) -> dict:
    rollout = make_rollout(ranks.device)
    shared = ranks.share(rollout if ranks.leads else None)
    mine = rollout[: ranks.rank * 3]  # rank 0 has none
    joined = ranks.concatenate(mine)
    return {"shared": shared.cpu(), "rollout": rollout.cpu(), "joined": joined.cpu(),
            "greatest": ranks.greatest(10 * ranks.rank)}


def run_rank(rank: int, device: str, count: int, folder: str) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("error", message="FSDP2-wrapped module .* returned a view")
    ranks = Ranks.join(device, rank=rank, count=count, device_index=rank, timeout=60.0,
                       address=f"file://{folder}/meeting")
    results: dict = {"cases": {}, "exchanges": run_exchanges(ranks), "scoring": run_scoring(ranks),
                     "refusals": run_refusals(ranks), "gathering": run_gathering(ranks),
                     "led": run_led(ranks)}
    for name, case in CASES.items():
        together = run_case(case, ranks.device, ranks)
        alone = run_case(case, ranks.device, None) if ranks.leads else None
        results["cases"][name] = {"together": together, "alone": alone}
    results["checkpoints"] = {name: run_checkpoints(ranks, Path(folder) / name, options)
                              for name, options in CHECKPOINTS.items()}
    if WITH_PEFT:
        results["adapters"] = run_adapters(ranks)
    torch.save(results, Path(folder) / f"results_{rank}.pt")
    leave_together(ranks)


def leave_together(ranks: Ranks) -> None:
    """As a run does it; NCCL, when it closes, waits for ranks that have not been told."""
    if ranks.leads:
        with Leader(ranks):
            pass
    else:
        obey(SimpleNamespace(ranks=ranks, loss=SimpleNamespace(actor_network=None)))
        ranks.leave()


def main() -> None:
    device, count, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    transformers.logging.disable_progress_bar()
    # Forked ranks need not import everything again; a GPU cannot be used after a fork.
    torch.multiprocessing.start_processes(
        run_rank, (device, count, folder), nprocs=count,
        start_method="fork" if device == "cpu" else "spawn")


if __name__ == "__main__":
    main()
