"""``GRPOLoss``: rollouts in, loss terms and diagnostics out."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor, nn
from torchrl.objectives import LossModule

from grpo import data
from grpo.data_torchrl import from_torchrl, is_dense
from grpo.objectives.advantages import AdvantageEstimator, check_estimator, group_advantages
from grpo.objectives.aggregate import Aggregation, aggregate, check_aggregation, normalizer
from grpo.objectives.diagnostics import summarize, token_stats
from grpo.objectives.head import HeadKind, TokenScorer
from grpo.objectives.kl import KLEstimator, kl_estimate
from grpo.objectives.surrogates import (
    DEFAULT_CLIP_EPSILON,
    check_clip_epsilon,
    get_surrogate,
)


class GRPOLoss(LossModule):
    r"""Group relative policy optimisation over token log-probs.

    .. math::
        L = \mathrm{agg}[\ell(r_t, A_t)] + \beta_{ref} \mathrm{agg}[KL_t(\pi \| \pi_{ref})]
            + \beta_{inf} \mathrm{agg}[KL_t(\pi \| \pi_{inf})] - c\,\mathrm{agg}[H_t]

    where :math:`r_t` is the ratio of the current to the sampling probability of token *t* and
    ``agg`` sums over the assistant tokens of the whole optimizer batch divided by one global
    normalizer. Only entries named ``loss_*`` carry gradient and sum to the loss
    (:func:`total_loss`); everything else is detached.

    To accumulate gradients over micro-batches, compute :meth:`normalizer` once on the whole batch
    and pass it to every call; the sum of the gradients is then that of one large batch, whatever
    the split::

        norm = loss.normalizer(batch)
        for micro_batch in split_rows(batch, num_micro_batches=4):
            total_loss(loss(micro_batch, normalizer=norm)).backward()

    Args:
        actor_network: a Hugging Face causal language model (or a TorchRL LLM wrapper of one, or
            any module that maps ``input_ids, attention_mask`` to ``.logits``).
        objective: name of a registered surrogate, see :mod:`grpo.objectives.surrogates`.
        clip_epsilon: ``(low, high)``, or one float for both; None for objectives without a clip.
        aggregation: ``"token"``, ``"sequence"`` or ``"dr_grpo"``, see
            :mod:`grpo.objectives.aggregate`.
        constant_length: tokens; the divisor of ``"dr_grpo"``, usually the response limit.
        kl_to_ref_coeff: weight of the KL to the reference policy, whose log-probs are then read
            from ``("next", "ref_log_probs", "full")``. None: no such term.
        kl_to_inference_coeff: weight of the KL to the policy that sampled the tokens.
        kl_estimator: ``"k1"``, ``"k2"`` or ``"k3"``, see :mod:`grpo.objectives.kl`.
        entropy_coeff: weight of the entropy bonus.
        temperature: the temperature the tokens were sampled at.
        advantage_estimator: how rewards become advantages where the batch brings none, see
            :func:`~grpo.objectives.advantages.group_advantages`.
        head: see :class:`~grpo.objectives.head.TokenScorer`.
        head_chunk_size: tokens whose logits exist at a time.
        packing: compute on packed rows instead of padded ones.
        compile_head: compile the head's chunk function.
        pad_token_id: fill value for ragged batches made by TorchRL's ``ChatEnv``.

    Raises:
        ValueError: for unknown names or values out of range, naming the argument.
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
        group_id: NestedKey = data.GROUP_ID
        tokens: NestedKey = data.TOKENS
        attention_mask: NestedKey = data.ATTENTION_MASK
        assistant_mask: NestedKey = data.ASSISTANT_MASK
        sample_log_prob: NestedKey = data.LOG_PROBS
        ref_log_probs: NestedKey = data.REF_LOG_PROBS

    default_keys = _AcceptedKeys

    def __init__(
        self,
        actor_network: nn.Module,
        *,
        objective: str = "ppo_clip",
        clip_epsilon: float | tuple[float, float] | None = DEFAULT_CLIP_EPSILON,
        aggregation: Aggregation = "token",
        constant_length: int | None = None,
        kl_to_ref_coeff: float | None = None,
        kl_to_inference_coeff: float | None = None,
        kl_estimator: KLEstimator = "k3",
        entropy_coeff: float = 0.0,
        temperature: float = 1.0,
        advantage_estimator: AdvantageEstimator = "group_norm",
        head: HeadKind = "auto",
        head_chunk_size: int = 4096,
        packing: bool = False,
        compile_head: bool = False,
        pad_token_id: int = 0,
    ) -> None:
        super().__init__()
        check_aggregation(aggregation, constant_length)
        check_estimator(advantage_estimator)
        kl_estimate(torch.zeros(1), torch.zeros(1), estimator=kl_estimator)  # checks the name
        for name, value in (("kl_to_ref_coeff", kl_to_ref_coeff), ("entropy_coeff", entropy_coeff),
                            ("kl_to_inference_coeff", kl_to_inference_coeff)):
            if value is not None and not value >= 0:  # NaN included
                raise ValueError(f"{name}={value} must be a number that is not negative")
        if hasattr(actor_network, "get_dist"):  # a TorchRL LLM wrapper
            actor_network = actor_network.model
        self.scorer = TokenScorer(
            actor_network, temperature=temperature, head=head, chunk_size=head_chunk_size,
            entropy_gradient=entropy_coeff > 0, packing=packing, compile_head=compile_head)
        self.objective = objective
        self.surrogate = get_surrogate(objective)
        self.clip_epsilon = check_clip_epsilon(objective, clip_epsilon)
        self.aggregation, self.constant_length = aggregation, constant_length
        self.kl_to_ref_coeff = kl_to_ref_coeff
        self.kl_to_inference_coeff = kl_to_inference_coeff
        self.kl_estimator, self.entropy_coeff = kl_estimator, entropy_coeff
        self.advantage_estimator = advantage_estimator
        self.pad_token_id = pad_token_id

    @property
    def actor_network(self) -> nn.Module:
        """The model that is trained."""
        return self.scorer.model

    # -- TorchRL's key interface ------------------------------------------------------------------

    @property
    def in_keys(self) -> list[NestedKey]:
        keys = self.tensor_keys
        needed = [keys.tokens, keys.attention_mask, keys.assistant_mask, keys.sample_log_prob,
                  keys.advantage]
        return needed + ([keys.ref_log_probs] if self.kl_to_ref_coeff is not None else [])

    @property
    def out_keys(self) -> list[NestedKey]:
        losses = ["loss_objective"]
        losses += ["loss_kl_to_ref"] if self.kl_to_ref_coeff is not None else []
        losses += ["loss_kl_to_inference"] if self.kl_to_inference_coeff is not None else []
        losses += ["loss_entropy"] if self.entropy_coeff else []
        return losses

    def _forward_value_estimator_keys(self, **kwargs) -> None:
        """There is no value estimator; TorchRL's ``set_keys`` calls this hook."""

    # -- the loss ---------------------------------------------------------------------------------

    def normalizer(self, batch: TensorDictBase) -> Tensor:
        """Divisor of the loss for a whole optimizer batch (float64 scalar).

        Under data parallelism add up the values of all ranks.
        """
        return self._count(self._loss_mask(self._standard(batch)))

    def forward(
        self, tensordict: TensorDictBase, *, normalizer: Tensor | float | None = None
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
        mask_BT = self._loss_mask(batch)
        advantage_B1 = self._advantage(batch, whole=normalizer is None)
        if normalizer is None:
            normalizer = self._count(mask_BT)
        log_probs_BT, entropy_BT = self.scorer(
            batch[data.TOKENS], batch[data.ATTENTION_MASK], mask_BT)
        # Outside the mask both are set to the same value, so the ratio there is exactly 1.
        sampled_BT = torch.where(mask_BT, batch[data.LOG_PROBS].to(log_probs_BT.dtype), 0.0)
        log_ratio_BT = log_probs_BT - sampled_BT

        def reduce(values_BT: Tensor) -> Tensor:
            return aggregate(values_BT, mask_BT, aggregation=self.aggregation,
                             normalizer=normalizer)

        advantage_B1 = advantage_B1.to(log_probs_BT.dtype)
        out = {"loss_objective": reduce(
            self.surrogate(log_ratio_BT, advantage_B1, clip_epsilon=self.clip_epsilon))}
        stats = {"log_ratio": log_ratio_BT, "advantage": advantage_B1, "entropy": entropy_BT}
        ref_BT = batch.get(data.REF_LOG_PROBS, None)
        if ref_BT is not None:
            ref_BT = torch.where(mask_BT, ref_BT.to(log_probs_BT.dtype), 0.0)
            stats["ref_log_ratio"] = log_probs_BT - ref_BT
        if self.kl_to_ref_coeff is not None:
            out["loss_kl_to_ref"] = self.kl_to_ref_coeff * reduce(
                kl_estimate(log_probs_BT, ref_BT, estimator=self.kl_estimator))
        if self.kl_to_inference_coeff is not None:
            out["loss_kl_to_inference"] = self.kl_to_inference_coeff * reduce(
                kl_estimate(log_probs_BT, sampled_BT, estimator=self.kl_estimator))
        if self.entropy_coeff:
            out["loss_entropy"] = -self.entropy_coeff * reduce(entropy_BT)
        out["token_stats"] = token_stats(mask_BT, **stats)
        out.update(summarize(out["token_stats"], clip_epsilon=self.clip_epsilon))
        return TensorDict(out, batch_size=[])

    def diagnostics(self, outputs: list[TensorDictBase]) -> dict[str, Tensor]:
        """Loss values and diagnostics of an optimizer batch from its micro-batches' outputs."""
        total = {key: sum(out[key].detach() for out in outputs) for key in self.out_keys}
        stats = torch.cat([out["token_stats"] for out in outputs])
        return total | summarize(stats, clip_epsilon=self.clip_epsilon)

    def _count(self, mask_BT: Tensor) -> Tensor:
        return normalizer(mask_BT, aggregation=self.aggregation,
                          constant_length=self.constant_length)

    # -- reading the batch ------------------------------------------------------------------------

    def _standard(self, tensordict: TensorDictBase) -> TensorDictBase:
        """The batch under the standard names of :mod:`grpo.data`, checked."""
        configured = {f.default: getattr(self.tensor_keys, f.name)
                      for f in fields(GRPOLoss._AcceptedKeys)}
        moved = {standard: tensordict.get(key, None)
                 for standard, key in configured.items() if standard != key}
        if moved:
            # An entry under the standard name is not what the caller asked to be read.
            tensordict = tensordict.exclude(*moved)
            for standard, value in moved.items():
                if value is not None:
                    tensordict[standard] = value
        if not is_dense(tensordict):
            tensordict = from_torchrl(tensordict, pad_token_id=self.pad_token_id)
        written = "the policy writes it"
        required = {data.TOKENS: written, data.ATTENTION_MASK: written,
                    data.ASSISTANT_MASK: written, data.LOG_PROBS: "sample with log-probs on"}
        if self.kl_to_ref_coeff is not None:
            required[data.REF_LOG_PROBS] = ("score the batch with the reference model, or set "
                                            "kl_to_ref_coeff=None")
        present = tensordict.keys(True)
        for key, fix in required.items():
            if key not in present:
                raise KeyError(f"the batch has no {configured[key]}: {fix}")
        shape = tensordict[data.TOKENS].shape
        for key in {**required, data.REF_LOG_PROBS: ""}:
            if key in present and tensordict[key].shape != shape:
                raise ValueError(f"{configured[key]} has shape {tuple(tensordict[key].shape)} but "
                                 f"{data.TOKENS} has {tuple(shape)}")
        return tensordict

    def _loss_mask(self, batch: TensorDictBase) -> Tensor:
        mask_BT = batch[data.ASSISTANT_MASK] & batch[data.ATTENTION_MASK]
        error = batch.get(data.REWARD_ERROR, None)
        if error is not None:  # a row without a reward is left out, not given a reward of 0
            mask_BT = mask_BT & ~error.reshape(-1, 1)
        # The first token of a row has no context to be predicted from.
        first = torch.arange(mask_BT.shape[1], device=mask_BT.device) == 0
        return mask_BT & ~first

    def _advantage(self, batch: TensorDictBase, *, whole: bool) -> Tensor:
        """``[B, 1]`` or ``[B, T]``; from the rewards where the batch brings none."""
        advantage = batch.get(data.ADVANTAGE, None)
        rows, width = batch[data.TOKENS].shape
        if advantage is not None:
            if tuple(advantage.shape) not in ((rows, 1), (rows, width)):
                raise ValueError(f"{self.tensor_keys.advantage!r} has shape "
                                 f"{tuple(advantage.shape)}; expected {(rows, 1)} or "
                                 f"{(rows, width)}")
            return advantage
        if not whole or any(k not in batch.keys(True) for k in (data.REWARD, data.GROUP_ID)):
            raise KeyError(
                f"the batch has no {self.tensor_keys.advantage!r}: call GroupAdvantage on the "
                f"whole rollout before splitting it (needs {self.tensor_keys.reward} and "
                f"{self.tensor_keys.group_id!r})")
        error = batch.get(data.REWARD_ERROR, None)
        return group_advantages(
            batch[data.REWARD].flatten(), batch[data.GROUP_ID].flatten(),
            estimator=self.advantage_estimator,
            valid_B=None if error is None else ~error.flatten())[:, None]


def total_loss(out: TensorDictBase) -> Tensor:
    """Sum of the ``loss_*`` entries of a loss module's output.

    Examples:
        >>> total_loss(TensorDict({"loss_objective": torch.tensor(2.0), "ess": torch.ones(())}))
        tensor(2.)
    """
    return sum(value for key, value in out.items() if key.startswith("loss_"))
