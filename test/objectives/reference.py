"""The loss a second time, from its formulas: one sequence after the other, nothing shared.

It takes nothing from the library, and the names and options are those of ``GRPOLoss``. Clipping is
written by cases instead of ``min``, padding never exists, and autograd differentiates all of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from tensordict import TensorDict
from torch import Tensor, nn

VOCAB = 23


@dataclass
class Sequence:
    """A row with at least one loss token; tensors ``[n]`` have these tokens only."""

    group: int
    log_p: Tensor
    entropy: Tensor
    sampled: Tensor
    advantage: Tensor
    logits: Tensor  # [n, V], before any temperature
    proximal: Tensor | None = None
    ref: Tensor | None = None
    high_entropy: Tensor | None = None
    listwise_weight: float | None = None
    teacher: list[tuple[list[int], Tensor]] | None = None  # tokens and log-probs of each

    def old(self, proximal: str) -> Tensor:
        """Log-probs in the ratio's denominator."""
        return {"sampled": self.sampled, "current": self.log_p.detach(),
                "scored": self.proximal}[proximal]


def score(logits: Tensor, batch, *, temperature: float = 1.0) -> list[Sequence]:
    """What the losses need to know of a batch, from logits ``[B, T, V]``."""
    tokens, out = batch["tokens", "full"], []
    optional = {"proximal": ("log_probs", "proximal"), "ref": ("next", "ref_log_probs", "full"),
                "high_entropy": ("masks", "high_entropy")}
    for b in range(len(tokens)):
        error = "reward_error" in batch["next"].keys() and batch["next", "reward_error"][b].item()
        dropped = "row_mask" in batch.keys() and not batch["row_mask"][b].item()
        places = [t for t in range(1, tokens.shape[1])
                  if batch["masks", "all_attention_mask"][b, t]
                  and batch["masks", "all_assistant_mask"][b, t]]
        if error or dropped or not places:
            continue
        z = logits[b, [t - 1 for t in places]]
        p = (z / temperature).softmax(-1)
        advantage = batch["advantage"][b].double()
        sequence = Sequence(
            group=int(batch["group_id"][b]),
            log_p=torch.stack([p[i, tokens[b, t]] for i, t in enumerate(places)]).log(),
            entropy=-(p * p.log()).sum(-1), sampled=batch["log_probs", "full"][b, places].double(),
            advantage=advantage[places] if len(advantage) > 1 else advantage.expand(len(places)),
            logits=z)
        for name, key in optional.items():
            if key in batch.keys(True):
                setattr(sequence, name, batch[key][b, places].double())
        if "listwise_weight" in batch.keys():
            sequence.listwise_weight = batch["listwise_weight"][b].item()
        if "distill" in batch.keys():
            known = batch["distill", "log_probs"][b].double()
            sequence.teacher = [
                (batch["distill", "token_ids"][b, t][known[t] > -math.inf].tolist(),
                 known[t][known[t] > -math.inf]) for t in places]
        out.append(sequence)
    return out


# -- from terms to a scalar -----------------------------------------------------------------------


def aggregate(sequences: list[Sequence], terms: list[Tensor], aggregation: str,
              constant_length: int | None) -> Tensor:
    """``terms`` holds one tensor ``[n]`` for each sequence."""
    if aggregation == "token":
        return sum(term.sum() for term in terms) / sum(len(term) for term in terms)
    if aggregation == "sequence":
        return sum(term.mean() for term in terms) / len(terms)
    if aggregation == "dr_grpo":
        return sum(term.sum() for term in terms) / (len(terms) * constant_length)
    prompts = {}
    for sequence, term in zip(sequences, terms, strict=True):
        prompts.setdefault(sequence.group, []).append(term)
    return sum(torch.cat(terms).mean() for terms in prompts.values()) / len(prompts)


# -- the objective --------------------------------------------------------------------------------


def pessimistic(ratio: Tensor, advantage: Tensor, clip_epsilon, delta: float = math.inf) -> Tensor:
    """The clipped surrogate to be minimised, with the dual clip where ``delta`` is finite."""
    low, high = clip_epsilon
    good, bad = ratio.clamp(max=1 + high), ratio.clamp(min=1 - low).clamp(max=delta)
    return -torch.where(advantage > 0, good, bad) * advantage


def ppo_clip(s, old, clip_epsilon=(0.2, 0.2), delta=None):
    return pessimistic((s.log_p - old).exp(), s.advantage, clip_epsilon, delta or math.inf)


def cispo(s, old, clip_epsilon=(1.0, 0.2)):
    ratio = (s.log_p - old).exp().detach()
    return -ratio.clamp(1 - clip_epsilon[0], 1 + clip_epsilon[1]) * s.advantage * s.log_p


def gspo(s, old, clip_epsilon=(3e-4, 4e-4)):
    ratio = ((s.log_p - old).sum() / len(old)).exp()
    return pessimistic(ratio.expand(len(old)), s.advantage, clip_epsilon)


def gspo_token(s, old, clip_epsilon=(3e-4, 4e-4)):
    ratio = ((s.log_p - old).sum() / len(old)).exp().detach()
    return pessimistic(ratio * (s.log_p - s.log_p.detach()).exp(), s.advantage, clip_epsilon)


def binary_divergence(s, old, kind: str) -> Tensor:
    """Between sampling a token or another one, under the current and the old policy."""
    p, q = s.log_p.detach().exp(), old.exp()
    if kind == "tv":
        return (p - q).abs()
    return q * (q / p).log() + (1 - q) * ((1 - q) / (1 - p)).log()


def dppo(s, old, divergence="tv", threshold=None):
    threshold = threshold or {"tv": 0.15, "kl": 0.05}[divergence]
    ratio = (s.log_p - old).exp()
    far = binary_divergence(s, old, divergence) > threshold
    away = ((s.advantage > 0) & (ratio > 1)) | ((s.advantage < 0) & (ratio < 1))
    return -torch.where(far & away, 0.0, ratio * s.advantage)


def sapo(s, old, temperature_positive=1.0, temperature_negative=1.05):
    ratio = (s.log_p - old).exp()
    t = torch.full_like(ratio, temperature_negative).masked_fill(s.advantage > 0,
                                                                 temperature_positive)
    return -4 / t / (1 + (-t * (ratio - 1)).exp()) * s.advantage


def reinforce(s, old):
    return -(s.log_p - old).exp() * s.advantage


OBJECTIVES = {"ppo_clip": ppo_clip, "cispo": cispo, "gspo": gspo, "gspo_token": gspo_token,
              "dppo": dppo, "sapo": sapo, "reinforce": reinforce}


def mismatch_weight(s: Sequence, proximal: str, mismatch) -> Tensor:
    """Product of the configured corrections, ``[n]``."""
    gap, weight = s.old(proximal) - s.sampled, torch.ones_like(s.sampled)
    for name, bounds in mismatch.items():
        level, _, kind = name.rpartition("_")
        ratio = {"": gap, "sequence": gap.sum(), "geometric": gap.sum() / len(gap)}[level].exp()
        if kind == "tis":
            weight = weight * ratio.clamp(max=bounds)
            continue
        low, high = bounds if isinstance(bounds, tuple) else (0, bounds)
        inside = (low <= ratio) & (ratio <= high)
        weight = weight * inside * (ratio if kind == "mis" else 1)
    return weight


def is_off_policy(s: Sequence, delta: float) -> bool:
    """Whether the off-policy mask drops the sequence."""
    return bool(s.advantage.sum() < 0 and (s.sampled - s.log_p).sum() / len(s.sampled) > delta)


def objective_loss(sequences, *, objective="ppo_clip", clip_epsilon=None, objective_options=None,
                   proximal="sampled", mismatch=None, off_policy_delta=None,
                   high_entropy_only=False, aggregation="token", constant_length=None) -> Tensor:
    options = dict(objective_options or {})
    if clip_epsilon is not None:
        options["clip_epsilon"] = clip_epsilon
    terms = []
    for s in sequences:
        term = OBJECTIVES[objective](s, s.old(proximal), **options)
        if mismatch:
            term = term * mismatch_weight(s, proximal, mismatch)
        if off_policy_delta is not None and is_off_policy(s, off_policy_delta):
            term = 0 * term
        terms.append(term * s.high_entropy if high_entropy_only else term)
    return aggregate(sequences, terms, aggregation, constant_length)


def maxent_loss(sequences, *, objective, proximal="sampled", aggregation="prompt",
                clip_epsilon=(0.2, 0.2), length_normalize=True, clip_coeff=0.0) -> Tensor:
    """Mean over the prompts of the loss of a prompt's sequences."""
    assert aggregation == "prompt"
    prompts = {}
    for s in sequences:
        prompts.setdefault(s.group, []).append(s)
    total = 0
    for members in prompts.values():
        weights = torch.tensor([s.listwise_weight for s in members], dtype=torch.float64)
        weights = weights / weights.sum()
        scores = torch.stack([s.log_p.sum() / (len(s.log_p) if length_normalize else 1)
                              for s in members])
        shares = scores.exp() / scores.exp().sum()
        total = total - (weights * (shares.log() if objective == "maxent_listwise" else scores)
                         ).sum()
        for s, weight in zip(members, weights, strict=True):
            ratio = ((s.log_p - s.old(proximal)).sum() / len(s.log_p)).exp()
            advantage = weight - 1 / len(members)
            total = total + clip_coeff * pessimistic(ratio, advantage, clip_epsilon)
    return total / len(prompts)


# -- the other terms ------------------------------------------------------------------------------


def kl_loss(sequences, *, to, estimator="k3", proximal="sampled", aggregation="token",
            constant_length=None) -> Tensor:
    """``to``: ``"ref"`` or ``"sampled"``."""
    terms = []
    for s in sequences:
        d = s.log_p - getattr(s, to)
        k3 = (-d).exp() - 1 + d
        terms.append({"k1": d, "k2": d * d / 2, "k3": k3,
                      "unbiased_k3": (s.log_p - s.old(proximal)).exp() * k3}[estimator])
    return aggregate(sequences, terms, aggregation, constant_length)


def entropy_loss(sequences, *, aggregation="token", constant_length=None) -> Tensor:
    return -aggregate(sequences, [s.entropy for s in sequences], aggregation, constant_length)


def distillation_loss(sequences, *, temperature, aggregation="token", constant_length=None):
    """Cross-entropy of the teacher's known tokens, renormalised, with the student's policy."""
    terms = []
    for s in sequences:
        term = []
        for z, (ids, log_probs) in zip(s.logits, s.teacher, strict=True):
            student = (z / temperature).log_softmax(-1)
            term.append(-sum(share * student[token] for share, token in zip(
                (log_probs / temperature).softmax(-1), ids, strict=True)))
        terms.append(torch.stack(term))
    return aggregate(sequences, terms, aggregation, constant_length)


def losses(sequences, *, kl_to_ref_coeff=None, kl_to_inference_coeff=None, kl_estimator="k3",
           entropy_coeff=None, distill_coeff=None, distill_temperature=None, **options) -> dict:
    """All terms by the names that ``GRPOLoss`` gives them."""
    reduction = {"aggregation": options.get("aggregation", "token"),
                 "constant_length": options.get("constant_length")}
    kl = {"estimator": kl_estimator, "proximal": options.get("proximal", "sampled"), **reduction}
    out = {"loss_objective": objective_loss(sequences, **options)}
    if kl_to_ref_coeff is not None:
        out["loss_kl_to_ref"] = kl_to_ref_coeff * kl_loss(sequences, to="ref", **kl)
    if kl_to_inference_coeff is not None:
        out["loss_kl_to_inference"] = kl_to_inference_coeff * kl_loss(sequences, to="sampled", **kl)
    if entropy_coeff is not None:
        out["loss_entropy"] = entropy_coeff * entropy_loss(sequences, **reduction)
    if distill_coeff is not None:
        out["loss_distill"] = distill_coeff * distillation_loss(
            sequences, temperature=distill_temperature, **reduction)
    return out


# -- a batch and a model --------------------------------------------------------------------------

PROMPTS = (2, 2, 0, 1, 3, 1, 2, 3, 1, 2, 1, 2, 3, 1, 2, 1)
RESPONSES = (5, 3, 6, 5, 4, 5, 6, 5, 1, 6, 7, 3, 0, 5, 3, 4)
SEED = 500
WIDTH = 9  # more than any row has
#: Six rows have every pair of the sign of the advantage and the side of the sequence's ratio.
SIGNS = 2 * (1, 1, 1, -1, -1, -1) + (1, -1, 1, -1)
DRIFTS = 2 * (0.35, -0.45, 0.0, 0.45, -0.35, 0.0) + (0.0, 0.1, 0.2, -0.2)
GROUPS = (5, 2, 5, 0, 2, 0, 5, 2, 0, 7, 2, 7, 2, 7, 9, 9)  # all rows of prompt 9 are left out


def shuffled(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def odd_batch(model, *, temperature=1.0, level="row_A"):
    """A batch with what a tidy one lacks: an empty response, turns, tokens without context, rows
    without a reward and rows that were filtered."""
    prompts, responses = torch.tensor(PROMPTS)[:, None], torch.tensor(RESPONSES)[:, None]
    B, T = len(prompts), WIDTH
    attention = torch.arange(T) < prompts + responses
    assistant = attention & (torch.arange(T) >= prompts)
    assistant[6, 3:5] = False  # a tool's output between two turns
    assistant[13] = True  # prompt and padding too
    # Not the padding token, whose embedding has no gradient in Transformers.
    tokens = torch.randint(1, VOCAB, (B, T), generator=torch.Generator().manual_seed(0))
    tokens *= attention
    with torch.no_grad():
        logits = model(input_ids=tokens, attention_mask=attention).logits / temperature
    log_probs = logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    log_probs = nn.functional.pad(log_probs, (1, 0)).float()
    drift = torch.tensor(DRIFTS)[:, None]

    def near(seed, drift, noise=0.4):
        return ((log_probs + drift + noise * shuffled(B, T, seed=seed)).clamp(max=-0.02)
                * (assistant & attention))

    advantage = (0.2 + shuffled(B, 1, seed=1).abs()) * torch.tensor(SIGNS)[:, None]
    if level == "token_A":
        advantage = advantage + 0.7 * shuffled(B, T, seed=2)
    distill_ids = torch.stack([torch.randperm(VOCAB, generator=torch.Generator().manual_seed(i))[:3]
                               for i in range(B * T)]).view(B, T, 3)
    distill_log_probs = shuffled(B, T, 3, seed=3).log_softmax(-1)
    distill_log_probs[1, :, 2] = -torch.inf  # fewer than three known
    rows = torch.arange(B)[:, None]
    return TensorDict({
        "tokens": {"full": tokens},
        "masks": {"all_attention_mask": attention, "all_assistant_mask": assistant,
                  "high_entropy": shuffled(B, T, seed=4) > 0},
        "log_probs": {"full": near(SEED + 5, -drift), "proximal": near(SEED + 6, -0.7 * drift)},
        "next": {"reward": shuffled(B, 1, seed=7), "reward_error": (rows == 11) | (rows == 14),
                 "ref_log_probs": {"full": near(8, 0.0, noise=0.5)}},
        "row_mask": rows != 15,
        "group_id": torch.tensor(GROUPS),
        "advantage": advantage,
        "listwise_weight": shuffled(B, 1, seed=9).exp(),
        "distill": {"token_ids": distill_ids, "log_probs": distill_log_probs},
    }, batch_size=[B])


class Logits(nn.Module):
    """A "model" whose parameters are the logits; half of the tokens are likely, half are not."""

    def __init__(self, dtype=torch.float64) -> None:
        super().__init__()
        self.table = nn.Parameter(shuffled(len(PROMPTS), WIDTH, VOCAB, seed=10))
        tokens = odd_batch(self)["tokens", "full"].roll(-1, dims=1)[..., None]
        likely = 3.0 * (shuffled(*tokens.shape, seed=11) > 0)
        self.table.data.scatter_add_(-1, tokens, likely)
        self.to(dtype)  # float64 has the numbers of float32

    def forward(self, input_ids, attention_mask):
        return SimpleNamespace(logits=self.table)
