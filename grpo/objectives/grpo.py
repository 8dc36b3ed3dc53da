"""``GRPOLoss``: rollouts in, loss terms and diagnostics out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor, nn
from torchrl.objectives import LossModule

from grpo import data
from grpo.objectives.advantages import GroupAdvantage
from grpo.objectives.aggregate import (
    Aggregation,
    Normalizer,
    check_aggregation,
    check_whole_groups,
    count,
    row_weights,
)
from grpo.objectives.diagnostics import summarize
from grpo.objectives.distillation import check_distillation, distillation_terms
from grpo.objectives.estimators import check_estimator
from grpo.objectives.head import sum_dtype
from grpo.objectives.inputs import BatchTokens, Rows, batch_tokens, loss_mask, standard_batch
from grpo.objectives.kl import KLEstimator
from grpo.objectives.registry import ClipEpsilon
from grpo.objectives.scorer import HeadKind, Predictions, TokenScorer
from grpo.objectives.terms import LossTerms, Proximal

#: What the loss reads of each token or row, where the batch has it, beside the advantage.
_ENTRIES = {"sampled": data.LOG_PROBS, "proximal": data.PROXIMAL_LOG_PROBS,
            "ref": data.REF_LOG_PROBS, "high_entropy": data.HIGH_ENTROPY_MASK,
            "listwise_weight": data.LISTWISE_WEIGHT, "distill_ids": data.DISTILL_IDS,
            "distill_log_probs": data.DISTILL_LOG_PROBS}


class GRPOLoss(LossModule):
    r"""Group relative policy optimisation over token log-probs.

    .. math::
        L = \mathrm{agg}[w_t\, \ell(r_t, A_t)] + \beta_{ref} \mathrm{agg}[KL_t(\pi \| \pi_{ref})]
            + \beta_{inf} \mathrm{agg}[KL_t(\pi \| \pi_{inf})] - c\,\mathrm{agg}[H_t]
            + d\,\mathrm{agg}[CE_t]

    where :math:`r_t` is the ratio of the current to the proximal probability of token *t*,
    :math:`w_t` its mismatch correction, and ``agg`` sums over the sampled tokens and divides by
    one normalizer for the whole optimizer batch. The entries named ``loss_*`` carry gradient and
    sum to the loss (:func:`total_loss`); everything else is detached.

    To accumulate gradients, compute the normalizer once on the whole batch and pass it to every
    call. The gradients then sum to that of the whole batch, however it was split::

        norm = loss.normalizer(batch)
        for micro_batch in split_rows(batch, num_micro_batches=4):
            total_loss(loss(micro_batch, normalizer=norm)).backward()

    Args:
        actor_network: a Hugging Face causal language model, a TorchRL LLM wrapper of one, or any
            module that maps ``input_ids, attention_mask`` to ``.logits``.
        objective: a name of :mod:`grpo.objectives.surrogates` or :mod:`grpo.objectives.listwise`,
            or ``"module:function"`` of one's own.
        clip_epsilon: ``(low, high)``, or one float for both; None: the objective's own default.
        objective_options: the objective's other options, such as ``{"delta": 3.0}`` for the dual
            clip of ``"ppo_clip"``.
        aggregation: a name of :mod:`grpo.objectives.aggregate`.
        constant_length: tokens; the divisor of ``"dr_grpo"``, usually the response limit.
        proximal: the policy in the ratio's denominator. ``"sampled"``: the log-probs the tokens
            were sampled with. ``"scored"``: those in ``("log_probs", "proximal")``, which the
            trainer computed before its first step on the rollout. ``"current"``: the policy as it
            is, for one step a rollout; the ratio is 1 and carries the gradient.
        mismatch: corrections for the gap between proximal and sampling policy, such as
            ``{"tis": 2.0}``, see :mod:`grpo.objectives.mismatch`.
        off_policy_delta: drop sequences with a negative advantage whose mean log-prob has fallen
            by more than so many nats a token since they were sampled.
        high_entropy_only: apply the objective to the tokens of ``("masks", "high_entropy")`` only.
        kl_to_ref_coeff: weight of the KL to the reference policy, whose log-probs are then read
            from ``("next", "ref_log_probs", "full")``. None, here and below: no such term. This
            and ``entropy_coeff`` may be set between steps, as attributes of ``terms``.
        kl_to_inference_coeff: weight of the KL to the policy that sampled the tokens.
        kl_estimator: a name of :mod:`grpo.objectives.kl`.
        entropy_coeff: weight of the entropy bonus.
        distill_coeff: weight of the cross-entropy with a teacher's most likely tokens, see
            :mod:`grpo.objectives.distillation`.
        distill_temperature: of both distributions in it; None: ``temperature``.
        temperature: the temperature the tokens were sampled at.
        advantage_estimator: how rewards become advantages where the batch brings none, see
            :func:`~grpo.objectives.advantages.group_advantages`.
        head: see :class:`~grpo.objectives.scorer.TokenScorer`; ``"auto"`` is fused wherever tokens
            or sequences can be differentiated one chunk after the other.
        head_chunk_size: tokens whose logits exist at a time; None: by device.
        packing: compute on packed rows instead of padded ones.
        fp32_head: compute logits in float32 where the model has half precision.
        pad_token_id: fill value for ragged batches made by TorchRL's ``ChatEnv``.

    Raises:
        ValueError: for unknown names, values out of range and options that exclude each other,
            naming the argument.
        KeyError: from ``forward``, when the batch lacks a key that the options need.

    Examples:
        >>> from transformers import Qwen2Config, Qwen2ForCausalLM
        >>> model = Qwen2ForCausalLM(Qwen2Config(
        ...     vocab_size=11, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        ...     num_attention_heads=2, num_key_value_heads=1))
        >>> mask = torch.tensor([[False, True, True], [False, True, True]])
        >>> batch = TensorDict({
        ...     "tokens": {"full": torch.tensor([[1, 2, 3], [1, 4, 5]])},
        ...     "masks": {"all_attention_mask": torch.ones_like(mask), "all_assistant_mask": mask},
        ...     "log_probs": {"full": torch.full((2, 3), -2.4)},
        ...     "next": {"reward": torch.tensor([[1.0], [0.0]])},
        ...     "group_id": torch.tensor([0, 0]),
        ... }, batch_size=[2])
        >>> out = GRPOLoss(model)(batch)
        >>> total_loss(out).backward()
        >>> model.lm_head.weight.grad is not None
        True
    """

    @dataclass
    class _AcceptedKeys(LossModule._AcceptedKeys):
        """Configurable keys; change one with :meth:`set_keys`."""

        advantage: NestedKey = data.ADVANTAGE
        reward: NestedKey = data.REWARD
        reward_error: NestedKey = data.REWARD_ERROR
        row_mask: NestedKey = data.ROW_MASK
        group_id: NestedKey = data.GROUP_ID
        tokens: NestedKey = data.TOKENS
        attention_mask: NestedKey = data.ATTENTION_MASK
        assistant_mask: NestedKey = data.ASSISTANT_MASK
        sample_log_prob: NestedKey = data.LOG_PROBS
        proximal_log_probs: NestedKey = data.PROXIMAL_LOG_PROBS
        ref_log_probs: NestedKey = data.REF_LOG_PROBS

    default_keys = _AcceptedKeys

    def __init__(
        self,
        actor_network: nn.Module,
        *,
        objective: str = "ppo_clip",
        clip_epsilon: ClipEpsilon = None,
        objective_options: Mapping[str, Any] | None = None,
        aggregation: Aggregation = "token",
        constant_length: int | None = None,
        proximal: Proximal = "sampled",
        mismatch: Mapping[str, float | tuple[float, float]] | None = None,
        off_policy_delta: float | None = None,
        high_entropy_only: bool = False,
        kl_to_ref_coeff: float | None = None,
        kl_to_inference_coeff: float | None = None,
        kl_estimator: KLEstimator = "k3",
        entropy_coeff: float | None = None,
        distill_coeff: float | None = None,
        distill_temperature: float | None = None,
        temperature: float = 1.0,
        advantage_estimator: str = "group_norm",
        head: HeadKind = "auto",
        head_chunk_size: int | None = None,
        packing: bool = False,
        fp32_head: bool = False,
        pad_token_id: int = 0,
    ) -> None:
        super().__init__()
        check_aggregation(aggregation, constant_length)
        check_estimator(advantage_estimator)
        self.terms = LossTerms(
            objective=objective, clip_epsilon=clip_epsilon, objective_options=objective_options,
            proximal=proximal, mismatch=mismatch, off_policy_delta=off_policy_delta,
            high_entropy_only=high_entropy_only, kl_to_ref_coeff=kl_to_ref_coeff,
            kl_to_inference_coeff=kl_to_inference_coeff, kl_estimator=kl_estimator,
            entropy_coeff=entropy_coeff)
        if self.terms.scope == "group" and aggregation != "prompt":
            raise ValueError(f"objective={objective!r} is a loss of whole groups; set "
                             f"aggregation='prompt' instead of {aggregation!r}")
        if hasattr(actor_network, "get_dist"):  # a TorchRL LLM wrapper
            actor_network = actor_network.model
        self.scorer = TokenScorer(
            actor_network, temperature=temperature, head=head, chunk_size=head_chunk_size,
            packing=packing, fp32_head=fp32_head)
        self.aggregation, self.constant_length = aggregation, constant_length
        self.distill_coeff = distill_coeff
        self.distill_temperature = check_distillation(
            distill_coeff, distill_temperature, default=temperature, scorer=self.scorer)
        self.advantage_estimator, self.head = advantage_estimator, head
        self.pad_token_id = pad_token_id
        if head == "fused" and not self._can_fuse:
            raise ValueError(f"head='fused' needs a loss of single tokens or sequences from their "
                             f"own log-probs; objective={objective!r} with distill_coeff="
                             f"{distill_coeff} is not; use head='auto'")

    @property
    def actor_network(self) -> nn.Module:
        """The model that is trained."""
        return self.scorer.model

    @property
    def clip_epsilon(self) -> tuple[float, float] | None:
        """``(low, high)`` of the objective; None where nothing is clipped."""
        return self.terms.clip_epsilon

    @property
    def _can_fuse(self) -> bool:
        return self.terms.scope != "group" and self.distill_coeff is None

    # -- TorchRL's key interface ------------------------------------------------------------------

    @property
    def in_keys(self) -> list[NestedKey]:
        names = self._names()
        return [names.get(key, key) for key in (*self._required(), data.ADVANTAGE)]

    @property
    def out_keys(self) -> list[NestedKey]:
        return self.terms.names + ["loss_distill"] * (self.distill_coeff is not None)

    def _forward_value_estimator_keys(self, **kwargs) -> None:
        """There is no value estimator; TorchRL's ``set_keys`` calls this hook."""

    # -- the loss ---------------------------------------------------------------------------------

    def normalizer(self, batch: TensorDictBase) -> Normalizer:
        """What the loss of a whole optimizer batch is divided by; those of several ranks add up."""
        batch = self._standard(batch)
        return self._count(batch, loss_mask(batch))

    def forward(
        self, tensordict: TensorDictBase, *, normalizer: Normalizer | None = None
    ) -> TensorDict:
        """Loss terms and diagnostics of one (micro-)batch.

        Args:
            tensordict: a dense batch, see :mod:`grpo.data`, or one from TorchRL's ``ChatEnv``.
            normalizer: from :meth:`normalizer` over the whole optimizer batch. None means that
                ``tensordict`` is the whole batch.

        Returns:
            TensorDict with the ``loss_*`` scalars (sum them), detached diagnostics of
            :func:`~grpo.objectives.diagnostics.summarize`, and their raw material
            ``"token_stats"`` for exact diagnostics over several micro-batches.
        """
        batch = self._standard(tensordict)
        mask_BT, group_B = loss_mask(batch), _groups(batch)
        values = self._values(batch, whole=normalizer is None)
        normalizer = self._count(batch, mask_BT) if normalizer is None else normalizer
        if self.terms.scope == "group":
            check_whole_groups(mask_BT, normalizer, group_id_B=group_B)
        values["weight"] = row_weights(mask_BT, normalizer, aggregation=self.aggregation,
                                       group_id_B=group_B)
        self.scorer.entropy_gradient = bool(self.terms.entropy_coeff)
        predictions = self.scorer.predict(batch[data.TOKENS], batch[data.ATTENTION_MASK], mask_BT)
        tokens = batch_tokens(mask_BT, values, group_B=group_B,
                              dtype=sum_dtype(predictions.states.dtype))
        losses, log_probs_N, entropy_N = self._losses(predictions, tokens)
        stats = self.terms.statistics(log_probs_N, entropy_N, tokens)
        diagnostics = summarize(stats, clip_epsilon=self.clip_epsilon)
        return TensorDict({**losses, "token_stats": stats, **diagnostics}, batch_size=[])

    def diagnostics(self, outputs: list[TensorDictBase]) -> dict[str, Tensor]:
        """Loss values and diagnostics of an optimizer batch from its micro-batches' outputs."""
        total = {key: sum(out[key].detach() for out in outputs) for key in self.out_keys}
        stats = torch.cat([out["token_stats"] for out in outputs])
        return total | summarize(stats, clip_epsilon=self.clip_epsilon)

    def _losses(
        self, predictions: Predictions, tokens: BatchTokens
    ) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """The loss terms, and the log-prob and entropy of every token."""
        borders = self._borders(predictions, tokens.rows)
        if borders is None:
            log_probs_N, entropy_N = self.scorer.score(predictions)
            losses = self.terms(log_probs_N, entropy_N, tokens)
            if self.distill_coeff is not None:
                term_N = distillation_terms(
                    self.scorer, predictions, log_probs_N, tokens.flat["distill_ids"],
                    tokens.flat["distill_log_probs"], temperature=self.distill_temperature)
                losses["loss_distill"] = self.distill_coeff * (tokens.flat["weight"] * term_N).sum()
            return losses, log_probs_N, entropy_N

        def part_loss(log_probs: Tensor, entropy: Tensor, start: int, stop: int) -> Tensor:
            terms = self.terms(log_probs, entropy, tokens.part(start, stop))
            return torch.stack(list(terms.values()))

        terms_L, *values = self.scorer.fused_loss(predictions, part_loss, borders=borders)
        return dict(zip(self.out_keys, terms_L, strict=True)), *values

    def _borders(self, predictions: Predictions, rows: Rows) -> list[int] | None:
        """Parts for the fused head; None: it cannot be used, or there is nothing to fuse."""
        wanted = self.head in ("auto", "fused") and self.scorer.chunked and self._can_fuse
        if not (wanted and torch.is_grad_enabled() and rows.starts[-1]):
            return None
        if self.scorer.product_dtype(predictions) == torch.float16:
            # Gradients made in the forward pass underflow before a GradScaler can scale them.
            if self.head == "fused":
                raise ValueError("head='fused' loses small gradients in float16, which no loss "
                                 "scaler reaches; use head='auto', or bfloat16")
            return None
        chunk_size = self.scorer.tokens_per_chunk(predictions)
        borders = rows.borders(chunk_size, whole_rows=self.terms.scope == "sequence")
        if borders is None and self.head == "fused":
            raise ValueError(f"head='fused': a sequence is longer than head_chunk_size="
                             f"{chunk_size} tokens, and this loss needs it whole; raise "
                             "head_chunk_size, or use head='auto'")
        return borders

    # -- reading the batch ------------------------------------------------------------------------

    def _count(self, batch: TensorDictBase, mask_BT: Tensor) -> Normalizer:
        return count(mask_BT, aggregation=self.aggregation, constant_length=self.constant_length,
                     group_id_B=_groups(batch))

    def _names(self) -> dict[NestedKey, NestedKey]:
        """Where the batch has the entry of each standard name."""
        return {f.default: getattr(self.tensor_keys, f.name)
                for f in fields(GRPOLoss._AcceptedKeys)}

    def _required(self) -> dict[NestedKey, str]:
        """Entries without which there is no loss, each with what to do if it is missing."""
        terms, distils = self.terms, self.distill_coeff is not None
        written = "the policy writes it"
        score = "score the rollout with ProximalScorer before the first update, or set "
        distil = "the teacher's most likely tokens; or set distill_coeff=None"
        entries = [
            (data.TOKENS, True, written),
            (data.ATTENTION_MASK, True, written),
            (data.ASSISTANT_MASK, True, written),
            (data.LOG_PROBS, True, "sample with log-probs on"),
            (data.PROXIMAL_LOG_PROBS, terms.proximal == "scored", score + "proximal='sampled'"),
            (data.HIGH_ENTROPY_MASK, terms.high_entropy_only, score + "high_entropy_only=False"),
            (data.REF_LOG_PROBS, terms.kl_to_ref_coeff is not None,
             "score the batch with the reference model, or set kl_to_ref_coeff=None"),
            (data.GROUP_ID, self.aggregation == "prompt",
             "it tells which rows share a prompt; or choose another aggregation"),
            (data.LISTWISE_WEIGHT, terms.objective.reads_listwise_weight,
             "call MaxEntWeights on the whole rollout before splitting it"),
            (data.DISTILL_IDS, distils, distil),
            (data.DISTILL_LOG_PROBS, distils, distil)]
        return {key: fix for key, needed, fix in entries if needed}

    def _standard(self, tensordict: TensorDictBase) -> TensorDictBase:
        return standard_batch(tensordict, names=self._names(), required=self._required(),
                              pad_token_id=self.pad_token_id)

    def _values(self, batch: TensorDictBase, *, whole: bool) -> dict[str, Tensor]:
        present = batch.keys(True)
        values = {name: batch[key] for name, key in _ENTRIES.items() if key in present}
        return values | {"advantage": self._advantage(batch, whole=whole)}

    def _advantage(self, batch: TensorDictBase, *, whole: bool) -> Tensor:
        """``[B, 1]`` or ``[B, T]``; from the rewards where the batch brings none."""
        advantage = batch.get(data.ADVANTAGE, None)
        rows, width = batch[data.TOKENS].shape
        name = self.tensor_keys.advantage
        if advantage is not None:
            if tuple(advantage.shape) not in ((rows, 1), (rows, width)):
                raise ValueError(f"{name!r} has shape {tuple(advantage.shape)}; expected "
                                 f"{(rows, 1)} or {(rows, width)}")
            objective = self.terms.objective
            if not objective.token_advantages and advantage.shape[1] > 1:
                raise ValueError(f"{name!r} has one value a token, but the ratio of objective="
                                 f"{objective.name!r} is that of a whole sequence; give one "
                                 "value a row ([B, 1]), or use objective='gspo_token'")
            return advantage
        if not whole or any(k not in batch.keys(True) for k in (data.REWARD, data.GROUP_ID)):
            raise KeyError(
                f"the batch has no {name!r}: call GroupAdvantage on the whole rollout before "
                f"splitting it (needs {self.tensor_keys.reward} and {self.tensor_keys.group_id!r})")
        return GroupAdvantage(estimator=self.advantage_estimator)(batch.copy())[data.ADVANTAGE]


def _groups(batch: TensorDictBase) -> Tensor | None:
    """The prompt of each row, ``[B]``; a batch may have it as ``[B, 1]``."""
    group_id = batch.get(data.GROUP_ID, None)
    return None if group_id is None else group_id.flatten()


def total_loss(out: TensorDictBase) -> Tensor:
    """Sum of the ``loss_*`` entries of a loss module's output.

    Examples:
        >>> total_loss(TensorDict({"loss_objective": torch.tensor(2.0), "ess": torch.ones(())}))
        tensor(2.)
    """
    return sum(value for key, value in out.items() if key.startswith("loss_"))
