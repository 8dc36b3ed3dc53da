"""A trainer's rank other than the first; :mod:`grpo.training.local_ranks` starts its process.

    python -m grpo.run.rank_worker READY '{"config": ...}'
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

from grpo.system.collection import without_collection

with without_collection():
    import torch

    from grpo.config.sent import load_sent
    from grpo.run.build import load_tokenizer, quiet_libraries
    from grpo.run.build_model import load_model, prepare_model
    from grpo.run.build_objective import build_learner, build_loss, rows_like_a_batch
    from grpo.training.checkpoint import Checkpoint
    from grpo.training.ranks import Ranks
    from grpo.training.team import obey
    from grpo.weights.transfer import TransferBackend, WeightTransfer


def follow(
    ready: Path, config: dict[str, Any], path: str, dtype: str, *,
    transfer: TransferBackend | None, join: dict[str, Any], checkpoint: tuple[str, int] | None,
    warm_up: int | None,
) -> None:
    """Hold a part of the model, meet the other ranks, and follow the leader to the end.

    Args:
        ready: a file that is made when there is nothing left to do but to meet.
        config: the run's, as plain values.
        path: folder or hub id of the weights that the run starts from.
        dtype: of the weights, without ``torch.``.
        transfer: the backend of the :class:`~grpo.weights.transfer.WeightTransfer` in which all
            ranks take part; None: weights travel in another way.
        join: arguments of :meth:`grpo.training.ranks.Ranks.join`.
        checkpoint: folder and step of the one that the run goes on from.
        warm_up: tokens of the rows that layers are compiled with before the first batch; None: they
            are compiled for that. All ranks do the same.
    """
    quiet_libraries()
    checked = load_sent(config)
    model = load_model(path, checked, device=torch.device("cpu"), dtype=getattr(torch, dtype))
    resumed = checkpoint and Checkpoint(Path(checkpoint[0]), checkpoint[1])
    adapter = resumed.adapter_folder if resumed and checked.train_model.lora.enabled else None
    prepare_model(model, checked, adapter=adapter)
    loss = build_loss(checked, model, load_tokenizer(path))
    ready.touch()
    ranks = Ranks.join(**join)
    learner = build_learner(checked, loss, ranks)
    if resumed:
        learner.optimizer.load_state_dict(resumed.state()["optimizer"])
    if warm_up is not None:
        learner.warm_up(*rows_like_a_batch(checked, warm_up))
    obey(learner, transfer and WeightTransfer(model, None, backend=transfer))
    ranks.leave()


def main() -> None:
    """Be the rank that the command line describes."""
    logging.basicConfig(level=logging.WARNING)
    ready, order = sys.argv[1:]
    follow(Path(ready), **json.loads(order))


if __name__ == "__main__":
    main()
