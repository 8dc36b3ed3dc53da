"""TorchRL's collectors drive our weight updates."""

from __future__ import annotations

from typing import Any

from torch import nn
from torchrl.weight_update import NoWeightSyncScheme

from grpo.weights.shared import WeightSync


class PublishScheme(NoWeightSyncScheme):
    """A scheme whose updates are ``weights.publish()``.

    Nothing is sent to the collector, because its policy generates with an engine. Use it as
    ``Collector(weight_sync_schemes={"policy": scheme})``, or as
    ``scheme.create_sender().register_collector(collector)`` where the collector's constructor takes
    no schemes, as that of ``LLMCollector``.

    Args:
        weights: any of this package's ways to an engine.

    Examples:
        >>> import torch
        >>> from grpo.weights.shared import SameModule
        >>> weights = SameModule(torch.nn.Linear(1, 1))
        >>> sender = PublishScheme(weights).create_sender()
        >>> sender.update_weights()
        >>> weights.version
        1
    """

    def __init__(self, weights: WeightSync) -> None:
        super().__init__()
        self.publisher: WeightSync | None = weights

    def create_sender(self) -> PublishSender:
        """The trainer's end."""
        if not self.initialized_on_sender:
            self.init_on_sender(model_id="policy")
            self.connect()
        return PublishSender(self)

    def create_receiver(self, engine: Any = None) -> PublishReceiver:
        """The engine's end, which has nothing left to do."""
        return PublishReceiver()

    def send(self, weights: Any = None, worker_ids: int | list[int] | None = None) -> None:
        """Publish the trainer's weights; called by ``collector.update_policy_weights_()``.

        Raises:
            ValueError: for weights that are not the trainer's, or a choice of workers.
            RuntimeError: on a receiver, or before the scheme is connected.
        """
        if self.publisher is None or not self.synchronized_on_sender:
            raise RuntimeError("weights are published by the trainer's process; call "
                               "scheme.create_sender() there, or give the scheme to its collector")
        if weights is not None and weights is not getattr(self.publisher, "model", None):
            raise ValueError(f"this scheme publishes the trainer's own model, not a "
                             f"{type(weights).__name__}; call the update without weights")
        if worker_ids is not None:
            raise ValueError(f"worker_ids={worker_ids} chooses among workers that share one "
                             "engine; leave it out")
        self.publisher.publish()

    def __getstate__(self) -> dict[str, Any]:
        # Workers get the scheme pickled; the engine's handle stays with the trainer.
        return {**super().__getstate__(), "publisher": None}


class PublishSender:
    """TorchRL's recipe calls these methods of a sender."""

    def __init__(self, scheme: PublishScheme) -> None:
        self.scheme = scheme
        self.collectors: list[Any] = []

    def register_model(self, model: nn.Module) -> None:
        """Raise ValueError unless ``model`` is the one that is published."""
        published = getattr(self.scheme.publisher, "model", model)
        if model is not published:
            raise ValueError("the registered model is not the one whose weights are published; "
                             "register the trainer's model")

    def register_collector(self, collector: Any) -> None:
        """Let ``collector.update_policy_weights_()`` publish, and count versions with it."""
        self.collectors.append(collector)
        # The constructor of LLMCollector takes no schemes; this is what it would do with them.
        collector._setup_weight_sync(None, {"policy": self.scheme})

    def init_all_workers_group(self, *args: Any, **kwargs: Any) -> None:
        """The connection to the engine exists already."""

    def update_weights(self, weights: Any = None) -> None:
        """Publish, and count the version in every registered collector."""
        self.scheme.send(weights)
        for collector in self.collectors:
            collector.increment_version()

    def shutdown(self) -> None:
        """Forget the collectors."""
        self.collectors.clear()


class PublishReceiver:
    """TorchRL's recipe calls these methods; the engine has the weights already."""

    def init_all_workers_group(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to connect."""

    def apply_weights(self, weights: Any = None, inplace: bool = True) -> None:
        """Nothing to apply."""

    def poll_and_apply(self, timeout: float = 0.0) -> bool:
        """No update is ever pending."""
        return False
