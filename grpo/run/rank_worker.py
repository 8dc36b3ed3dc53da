"""A trainer's rank other than the first; :mod:`grpo.training.local_ranks` starts its process.

    python -m grpo.run.rank_worker READY '{"config": ...}'
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from grpo.config.asynchronous import AsyncConfig
from grpo.config.schema import Config, load_config
from grpo.run.build import load_tokenizer, quiet_libraries
from grpo.run.build_model import load_model, prepare_model
from grpo.run.build_objective import build_learner, build_loss
from grpo.training.checkpoint import Checkpoint
from grpo.training.ranks import Ranks
from grpo.training.team import obey
from grpo.weights.transfer import TransferBackend, WeightTransfer


class TrainerRank:
    """Hold a part of the model and follow the leader.

    Args:
        config: the run's, as plain values.
        path: folder or hub id of the weights that the run starts from.
        dtype: of the weights, without ``torch.``.
        transfer: the backend of the :class:`~grpo.weights.transfer.WeightTransfer` in which all
            ranks take part; None: weights travel in another way.
        join: arguments of :meth:`grpo.training.ranks.Ranks.join`.
        checkpoint: folder and step of the one that the run goes on from.
        asynchronous: whether the configuration is that of ``grpo-async.py``.
    """

    def __init__(self, config: dict[str, Any], path: str, dtype: str, *,
                 transfer: TransferBackend | None, join: dict[str, Any],
                 checkpoint: tuple[str, int] | None, asynchronous: bool) -> None:
        self.config, self.path, self.dtype = config, path, getattr(torch, dtype)
        self.transfer, self.join, self.asynchronous = transfer, join, asynchronous
        self.checkpoint = checkpoint and Checkpoint(Path(checkpoint[0]), checkpoint[1])

    def run(self, ready: Callable[[], object] = lambda: None) -> None:
        """Meet the others, then follow the leader to the end.

        Args:
            ready: called when there is nothing left to do but to meet.
        """
        quiet_libraries()
        config = load_config(self.config, AsyncConfig if self.asynchronous else Config)
        model = load_model(self.path, config, device=torch.device("cpu"), dtype=self.dtype)
        resumed = self.checkpoint if config.train_model.lora.enabled else None
        prepare_model(model, config, adapter=resumed and resumed.adapter_folder)
        loss = build_loss(config, model, load_tokenizer(self.path))
        ready()
        ranks = Ranks.join(**self.join)
        learner = build_learner(config, loss, ranks)
        if self.checkpoint is not None:
            learner.optimizer.load_state_dict(self.checkpoint.state()["optimizer"])
        weights = self.transfer and WeightTransfer(model, None, backend=self.transfer)
        obey(learner, weights)
        ranks.leave()


def main() -> None:
    """Be the rank that the command line describes."""
    logging.basicConfig(level=logging.WARNING)
    ready, order = sys.argv[1:]
    TrainerRank(**json.loads(order)).run(Path(ready).touch)


if __name__ == "__main__":
    main()
