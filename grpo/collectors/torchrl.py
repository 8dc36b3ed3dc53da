"""TorchRL's ``RayLLMCollector`` for our environments and policies.

:class:`RayLLMCollector` of TorchRL 0.14.1 fails on several of its own options: without
``remote_config`` it cannot be given ``num_cpus``, ``num_gpus`` or ``sync_iter=False``; its
``total_dialog_turns``, ``dialog_turns_per_batch`` and ``weight_updater`` ask a Ray actor for
attributes, which only has methods; and it has no way to bring weights to a policy whose parameters
are not its own, as ours. The subclass here puts these right and returns dense batches. For training
:class:`~grpo.collectors.ray.RayCollector` does more: it bounds staleness, and survives deaths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.collectors.llm import LLMCollector, RayLLMCollector
from torchrl.envs import EnvBase

from grpo.collectors.sync import DROPPED
from grpo.policies.base import Policy
from grpo.policies.ray_engine import answer, require_ray


class DenseLLMCollector(LLMCollector):
    """What runs in the actor: whole batches of our layout, and weights by name."""

    def next_batch(self) -> TensorDictBase | None:
        """The next batch, flat and dense; None when all turns have been collected."""
        if getattr(self, "_iterator", None) is None:
            self._iterator = iter(self)
        batch = next(self._iterator, None)
        return None if batch is None else batch.contiguous().exclude(*DROPPED)

    @torch.no_grad()
    def load_weights(self, weights: dict[str, torch.Tensor], version: int) -> None:
        """Give the policy's model new values; tokens from here on have this version."""
        for name, param in self.policy.model.named_parameters():
            param.copy_(weights[name])
        self.policy.version = lambda: version


class DenseRayLLMCollector(RayLLMCollector):
    """Batches of our layout from a Ray actor, through TorchRL's interface.

    Args:
        env: makes the environment, in the actor.
        policy_factory: makes a :class:`~grpo.policies.transformers.TransformersPolicy`, in the
            actor.
        dialog_turns_per_batch: rows of a batch, a multiple of the environment's batch size.
        total_dialog_turns: rows in all; -1: without end.
        sync_iter: False collects the next batch while the caller uses the last one.
        remote_config: options of the actor.
        timeout: seconds for a batch or an update.

    Raises:
        EngineError: if the actor fails, dies or takes longer than ``timeout``.

    Examples:
        >>> collector = DenseRayLLMCollector(
        ...     make_env, policy_factory=make_policy, dialog_turns_per_batch=32)  # doctest: +SKIP
        >>> for batch in collector:                                            # doctest: +SKIP
        ...     learner.update(advantage(batch), iteration=collector.policy_version)
        ...     collector.update_policy_weights_(model)
    """

    def __init__(
        self, env: Callable[[], EnvBase], *, policy_factory: Callable[[], Policy],
        dialog_turns_per_batch: int, total_dialog_turns: int = -1, sync_iter: bool = True,
        remote_config: dict[str, Any] | None = None, timeout: float = 1800.0,
    ) -> None:
        # Not the base's constructor, which fails on these options.
        require_ray()
        import ray

        self.sync_iter, self.timeout, self.replay_buffer = sync_iter, timeout, None
        self._turns = total_dialog_turns, dialog_turns_per_batch
        self._version = 0
        self._collector = ray.remote(DenseLLMCollector).options(**(remote_config or {})).remote(
            env=env, policy_factory=policy_factory, dialog_turns_per_batch=dialog_turns_per_batch,
            total_dialog_turns=total_dialog_turns, flatten_data=True)

    def __iter__(self) -> Iterator[TensorDictBase]:
        ahead = None if self.sync_iter else self._collector.next_batch.remote()
        while True:
            batch = self._answer(ahead or self._collector.next_batch.remote(), "a batch")
            if batch is None:
                return
            if not self.sync_iter:
                ahead = self._collector.next_batch.remote()
            yield batch

    def next(self) -> TensorDictBase | None:
        """The next batch; None when all turns have been collected."""
        return self._answer(self._collector.next_batch.remote(), "a batch")

    def update_policy_weights_(self, policy_or_weights: torch.nn.Module) -> None:
        """Give the policy a model's weights and count the version."""
        weights = {name: param.detach().to("cpu", copy=True)
                   for name, param in policy_or_weights.named_parameters()}
        self._answer(self._collector.load_weights.remote(weights, self._version + 1), "weights")
        self._version += 1

    @property
    def policy_version(self) -> int:
        """Weight updates so far."""
        return self._version

    @property
    def total_dialog_turns(self) -> int:
        return self._turns[0]

    @property
    def dialog_turns_per_batch(self) -> int:
        return self._turns[1]

    def shutdown(self) -> None:
        """End the actor."""
        import ray

        ray.kill(self._collector)

    def _answer(self, ref: Any, what: str) -> Any:
        return answer(ref, timeout=self.timeout, who="the collector's actor", what=what)
