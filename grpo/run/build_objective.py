"""From the configuration to what is optimised: advantages, loss, learner, reference, teacher and
controllers."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn

from grpo.config.schema import Config, ConfigError
from grpo.objectives import GroupAdvantage, GRPOLoss
from grpo.policies.scoring import ProximalScorer, ReferenceScorer, TeacherScorer
from grpo.training.adaptation import Adaptation
from grpo.training.learner import DEFAULT_TOKENS_PER_MICRO_BATCH, GPU_WIDTH_MULTIPLE, Learner
from grpo.training.optim import MasterAdamW
from grpo.training.parallel import ParallelLearner, ShardedAdamW, shard_model
from grpo.training.ranks import Ranks
from grpo.training.team import LedLearner, LedReference
from grpo.weights.adapters import AdapterDisabledReference

#: Loads a model by folder or hub id.
LoadModel = Callable[[str], nn.Module]


def build_advantage(config: Config) -> TensorDictModuleBase:
    """Rewards to advantages, or to the weights of a MaxEnt objective."""
    train = config.train
    if train.is_maxent:
        return config.maxent.weights()
    return GroupAdvantage(
        estimator=train.advantage_estimator or "group_norm", eps=train.advantage_eps,
        clip_percentile=train.advantage_clip_percentile,
        zero_variance_filter=train.zero_variance_filter, mask_truncated=train.mask_truncated,
        reverse_kl_coeff=config.distill.reverse_kl_coeff,
        overlong_buffer=config.overlong_tokens, overlong_factor=train.overlong_factor,
        max_response_tokens=None if train.overlong_buffer is None else config.max_tokens,
        kl_in_reward_coeff=train.kl_to_ref_coeff if train.kl_in_reward else None,
        kl_in_reward_estimator=train.kl_estimator if train.kl_in_reward else None)


def tau_warning(config: Config, vocabulary: int) -> str | None:
    """What to say of a MaxEnt temperature at which a model of random tokens fits the shares that
    are asked for better than one that is sure, with one at which it does not; None where it is low
    enough. Taken are rewards that are 1 apart, see "How large tau may be" in docs/objectives.md.
    """
    if config.train.objective != "maxent_listwise":
        return None
    maxent, chance = config.maxent, math.log(vocabulary)
    tau, beta = 1.0 if maxent.tau is None else maxent.tau, maxent.beta or 0.0
    q_temperature = maxent.q_temperature or 1.0
    most = 1 / (q_temperature * chance)
    if tau + beta <= most:
        return None
    share = most / 1.5  # not at the very border
    fit = (f"maxent.tau={_rounded_down(share - beta)} fits" if beta < share / 2 else
           f"maxent.tau={_rounded_down(share / 2)} and maxent.beta={_rounded_down(share / 2)} fit")
    return (f"maxent.tau={tau:g} with maxent.beta={beta:g} and maxent.q_temperature="
            f"{q_temperature:g} wants scores {1 / (q_temperature * (tau + beta)):.3g} nats a token "
            f"apart for rewards 1 apart, and below {chance:.3g} (log of the vocabulary) the best "
            f"such model draws its tokens at random (docs/objectives.md); {fit}")


def _rounded_down(value: float) -> str:
    """A positive number with one digit.

    Examples:
        >>> _rounded_down(0.0559), _rounded_down(0.12)
        ('0.05', '0.1')
    """
    unit = 10.0 ** math.floor(math.log10(value))
    return f"{math.floor(value / unit) * unit:.6g}"


def build_loss(config: Config, model: nn.Module, tokenizer: Any) -> GRPOLoss:
    """The loss of ``train.*`` and ``distill.*``."""
    train = config.train
    return GRPOLoss(
        model,
        **train.loss_terms(),
        aggregation=train.aggregation,
        constant_length=config.max_tokens if train.aggregation == "dr_grpo" else None,
        distill_coeff=config.distill.topk_coeff,
        distill_temperature=config.distill.temperature,
        temperature=config.inference_model.temperature,
        advantage_estimator=train.advantage_estimator or "group_norm",
        head=config.train_model.head,
        head_chunk_size=config.train_model.head_chunk_size,
        packing=bool(train.packing),  # null where nobody has chosen
        fp32_head=config.train_model.fp32_head,
        pad_token_id=tokenizer.pad_token_id)


def build_learner(config: Config, loss: GRPOLoss, ranks: Ranks | None = None) -> Learner:
    """Optimizer and micro-batching of ``optimizer.*`` and ``train.*``; shards the model over the
    ``ranks``, if there are several."""
    train, options = config.train, config.optimizer.model_dump()
    options["final_lr_fraction"] = options["final_lr_fraction"] or 0.0
    options["total_steps"] = config.optimizer_steps
    options["warmup_steps"] = config.optimizer.warmup(config.optimizer_steps)
    if ranks is None:
        optimizer = MasterAdamW(loss.actor_network.parameters(), **options)
    else:
        shard_model(loss.scorer, ranks)
        optimizer = ShardedAdamW(loss.actor_network, **options)
    pieces, budget = train.gradient_accumulation_steps, train.max_tokens_per_micro_batch
    if pieces is None and budget is None:
        budget = DEFAULT_TOKENS_PER_MICRO_BATCH
    proximal = None
    if train.proximal == "scored" or train.entropy_top_fraction is not None:
        proximal = ProximalScorer(loss.scorer, max_tokens=scoring_budget(config),
                                  entropy_fraction=train.entropy_top_fraction)
    on_gpu = next(loss.actor_network.parameters()).is_cuda
    learner = Learner if ranks is None else partial(ParallelLearner, ranks=ranks)
    return learner(
        loss, optimizer, rows_per_step=config.rows_per_optimizer_step, epochs=train.epochs,
        num_micro_batches=pieces, max_tokens_per_micro_batch=budget, seed=train.seed,
        width_multiple=GPU_WIDTH_MULTIPLE if on_gpu else 1, proximal=proximal)


def rows_like_a_batch(config: Config, width: int) -> tuple[Tensor, Tensor]:
    """Tokens and mask of completions of one prompt, half of each row, as many as a micro-batch has
    room for: something to compile for. Layers that were compiled for few tokens would be compiled
    again for many.

    Examples:
        >>> small = Config(env={"repeats": 4, "num_envs": 1})
        >>> tokens, mask = rows_like_a_batch(small, 6)
        >>> tokens[1].tolist(), mask[1].tolist()
        ([1, 1, 1, 2, 2, 2], [False, False, False, True, True, True])
    """
    rows = max(1, min(config.turns_per_batch, scoring_budget(config) // width))
    tokens_BT = torch.ones(rows, width, dtype=torch.int64)
    tokens_BT[:, width // 2:] += torch.arange(rows)[:, None] % 2  # or rows would share more
    mask_BT = (torch.arange(width) >= width // 2).expand(rows, -1)
    return tokens_BT, mask_BT.clone()


def build_reference(
    config: Config, model: nn.Module, start_model: Callable[[], str], load: LoadModel,
    learner: Learner | LedLearner | None = None,
) -> ReferenceScorer | AdapterDisabledReference | LedReference | None:
    """The reference policy, if anything is compared with it.

    Args:
        model: what is trained; with adapters it is its own reference, without them.
        start_model: folder or hub id of the model the run started from.
        load: makes another model of such a name.
        learner: of the model, if it may be one that leads several ranks.
    """
    if not config.needs_reference:
        return None
    options = {"temperature": config.inference_model.temperature,
               "max_tokens": scoring_budget(config), "fp32_head": config.train_model.fp32_head}
    if config.train_model.lora.enabled and config.ref_model.name is None:
        if isinstance(learner, LedLearner):
            return LedReference(learner, max_tokens=options["max_tokens"])
        return AdapterDisabledReference(model, **options)
    return ReferenceScorer(load(config.ref_model.name or start_model()), **options)


def build_teacher(config: Config, student: nn.Module, load: LoadModel) -> TeacherScorer | None:
    """The teacher of ``distill.*``, if there is one."""
    distill = config.distill
    if distill.teacher is None:
        return None
    model = load(distill.teacher)
    theirs, ours = (m.get_input_embeddings().num_embeddings for m in (model, student))
    if theirs != ours:
        raise ConfigError(f"distill.teacher={distill.teacher!r} has a vocabulary of {theirs} "
                          f"tokens, the policy one of {ours}; a teacher must share the policy's "
                          "tokenizer")
    return TeacherScorer(
        model, temperature=config.inference_model.temperature, max_tokens=scoring_budget(config),
        topk=None if distill.topk_coeff is None else distill.topk or 20,
        sampled_tokens=distill.reverse_kl_coeff is not None)


def build_adaptations(
    config: Config, loss: GRPOLoss, advantage: TensorDictModuleBase
) -> list[Adaptation]:
    """The controllers of the run, ready to start."""
    train = config.train
    of_kl = (advantage, "kl_in_reward_coeff") if train.kl_in_reward else (
        loss.terms, "kl_to_ref_coeff")
    followed = (
        ("kl_to_ref_coeff", config.kl_controller.controller(train.kl_to_ref_coeff),
         "policy/kl_to_ref", of_kl),
        ("entropy_coeff", config.entropy_controller.controller(train.entropy_coeff),
         "policy/entropy", (loss.terms, "entropy_coeff")),
        ("tau", config.maxent.controller(group_size=config.env.repeats),
         "advantage/weight_entropy", (advantage, "tau")))
    out = [Adaptation(name, controller, metric, partial(setattr, *target))
           for name, controller, metric, target in followed if controller is not None]
    for adaptation in out:
        adaptation.start()
    return out


def describe_loss(config: Config) -> str:
    """One line for the start-up banner."""
    train = config.train
    advantages = "MaxEnt weights" if train.is_maxent else (
        f"{train.advantage_estimator or 'group_norm'} advantages")
    parts = [train.objective, f"{train.aggregation} aggregation", advantages]
    if train.proximal != "sampled":
        parts.append(f"ratio to the {train.proximal} policy")
    parts += [f"{name} {bounds}" for name, bounds in (train.mismatch or {}).items()]
    if train.kl_to_ref_coeff is not None:
        where = "in the reward" if train.kl_in_reward else "in the loss"
        parts.append(f"KL to the reference x {train.kl_to_ref_coeff} {where}")
    if train.kl_to_inference_coeff is not None:
        parts.append(f"KL to the sampling policy x {train.kl_to_inference_coeff}")
    if train.entropy_coeff is not None:
        parts.append(f"entropy bonus x {train.entropy_coeff}")
    if config.distill.teacher is not None:
        parts.append(f"teacher {config.distill.teacher}")
    return ", ".join(parts)


def scoring_budget(config: Config) -> int:
    """Tokens of a micro-batch where nothing is differentiated."""
    return config.train.max_tokens_per_micro_batch or DEFAULT_TOKENS_PER_MICRO_BATCH

