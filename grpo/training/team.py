"""Several ranks that train one model, led by the process that runs the loop.

The leader is rank 0 and runs the :class:`~grpo.training.trainer.Trainer` as in one process, with a
:class:`LedLearner`. Before each step that takes all ranks it tells the others what to do; they do
nothing else (:func:`obey`). So loop, collector and reports know nothing of ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from grpo import data
from grpo.objectives import GRPOLoss
from grpo.policies.scoring import evaluating
from grpo.training.checkpoint import gather_trained
from grpo.training.learner import BeforeStep
from grpo.training.parallel import ParallelLearner, score_divided
from grpo.training.ranks import Ranks
from grpo.training.stopping import signals_held_back
from grpo.weights.adapters import adapters_disabled, whole_adapters
from grpo.weights.gather import TrainerRanks, trained_parameters

logger = logging.getLogger(__name__)

# Coefficients of the loss that controllers set, on the leading rank.
_CONTROLLED = ("kl_to_ref_coeff", "entropy_coeff")


class Leader:
    """Tells the other ranks what to do; a context manager around all that they do.

    At its end all ranks leave together, as NCCL waits for the others when it closes. After an error
    they may be in the middle of something, so they are left to whoever started them. ``check`` is
    called before each order, and raises if a rank is gone.

    Attributes:
        interrupted: the order in the middle of which this rank alone was ended by an error. The
            others wait for it there, so that nothing can be told any more.
    """

    def __init__(self, ranks: Ranks, check: Callable[[], None] = lambda: None) -> None:
        self.ranks, self.check = ranks, check
        self.interrupted: str | None = None

    @contextmanager
    def together(self, what: str, *details: Any) -> Iterator[None]:
        """Give an order that this rank carries out in the context, where all ranks meet.

        A signal is held back until they have, because what was trained can be saved only if the
        others can be told to; a second Ctrl-C is not.

        Raises:
            RuntimeError: if they are still in the middle of an earlier one.
        """
        with signals_held_back():
            self.check()
            if self.interrupted is not None:
                raise RuntimeError(f"the other ranks of the trainer are in the middle of "
                                   f"{self.interrupted!r}, in which rank 0 failed")
            try:
                dist.broadcast_object_list([(what, *details)], src=0, device=torch.device("cpu"))
                yield
            except BaseException as error:
                if not _ends_on_all(what, error):
                    self.interrupted = what
                raise

    def __enter__(self) -> Leader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        if error is None:
            with self.together("stop"):
                self.ranks.leave()


def _ends_on_all(what: str, error: BaseException) -> bool:
    """Whether an error of the leader ends an order on the other ranks, too."""
    return (isinstance(error, FloatingPointError)  # which all ranks find at the same place
            or what == "publish" and isinstance(error, Exception))  # see TrainerRanks.agreed


def obey(learner: ParallelLearner, weights: Any = None) -> None:
    """Do what the leader says until it says ``stop``; ``weights`` is this rank's part of a transfer
    to engines, if there is one."""
    ranks, model = learner.ranks, learner.loss.actor_network
    while True:
        order: list[Any] = [None]
        dist.broadcast_object_list(order, src=0, device=torch.device("cpu"))
        what, *details = order[0]
        if what == "stop":
            return
        if what == "update":
            iteration, coefficients = details
            for name, value in coefficients.items():
                setattr(learner.loss.terms, name, value)
            try:
                learner.update(ranks.share(None), iteration=iteration)
            except FloatingPointError as error:  # all ranks see it, and the leader may still save
                logger.warning("rank %d: %s", ranks.rank, error)
        elif what == "score":
            _score(learner.loss, ranks.share(None))
        elif what == "reference":
            _score_without_adapters(learner.loss, ranks, ranks.share(None), *details)
        elif what == "optimizer":
            learner.optimizer.state_dict()
        elif what == "save":
            gather_trained(model)  # rank 0 alone writes
        elif what == "gather":
            which, *part = details
            named = (trained_parameters(model) if which == "trained" else
                     part[0].choose(model.named_parameters()))
            for _ in TrainerRanks(model).whole(named):
                pass
        elif what == "perturb":
            learner.perturb()
        elif what == "restore":
            learner.restore()
        elif what == "adapters":
            whole_adapters(model)
        elif what == "differing":
            weights.differing(*details)
        elif what == "publish":
            weights.version = details[0]
            try:
                weights.publish()
            except RuntimeError as error:  # an engine died; the leader replaces it and repeats
                logger.warning("rank %d: %s", ranks.rank, error)
        else:
            raise ValueError(f"the leader asked for {what!r}, which no rank knows")


class LedLearner:
    """A :class:`~grpo.training.parallel.ParallelLearner` whose other ranks follow this one."""

    def __init__(self, learner: ParallelLearner, leader: Leader) -> None:
        self.learner, self.leader = learner, leader
        self.loss, self.optimizer = learner.loss, _LedOptimizer(learner.optimizer, leader)
        self.scorer = LedScorer(learner.loss, leader)
        self.before_step = BeforeStep()

    @property
    def seconds(self) -> dict[str, float]:
        return self.learner.seconds

    @property
    def halfway(self) -> bool:
        return self.learner.halfway

    def update(self, rollout: TensorDictBase, *, iteration: int) -> dict[str, float]:
        """See :meth:`grpo.training.learner.Learner.update`."""
        self.before_step()  # which may need the other ranks, as they are not busy yet
        coefficients = {name: getattr(self.loss.terms, name) for name in _CONTROLLED}
        with self.leader.together("update", iteration, coefficients):
            return self.learner.update(self.leader.ranks.share(rollout), iteration=iteration)

    def gathering(self) -> AbstractContextManager[None]:
        """See :meth:`grpo.training.learner.Learner.gathering`."""
        return self.leader.together("save")

    def perturb(self) -> None:
        """See :meth:`grpo.training.learner.Learner.perturb`."""
        with self.leader.together("perturb"):
            self.learner.perturb()

    def restore(self) -> None:
        """See :meth:`grpo.training.learner.Learner.restore`."""
        with self.leader.together("restore"):
            self.learner.restore()


class _LedOptimizer:
    def __init__(self, optimizer: Any, leader: Leader) -> None:
        self._optimizer, self._leader = optimizer, leader

    def state_dict(self) -> dict[str, Any]:
        with self._leader.together("optimizer"):
            return self._optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # Each rank reads the checkpoint itself and keeps its slices.
        self._optimizer.load_state_dict(state)


class LedReference:
    """The :class:`~grpo.weights.adapters.AdapterDisabledReference` of a sharded model: each rank
    scores a share of the rows, ``max_tokens`` a micro-batch."""

    def __init__(self, learner: LedLearner, *, max_tokens: int) -> None:
        self.loss, self.leader, self.max_tokens = learner.loss, learner.leader, max_tokens

    def __call__(self, rollout: TensorDictBase) -> TensorDictBase:
        needed = rollout.select(data.TOKENS, data.ATTENTION_MASK, data.ASSISTANT_MASK,
                                data.LOG_PROBS)
        ranks = self.leader.ranks
        with self.leader.together("reference", self.max_tokens):
            log_probs_BT = _score_without_adapters(self.loss, ranks, ranks.share(needed),
                                                   self.max_tokens)
        rollout[data.REF_LOG_PROBS] = log_probs_BT.to(rollout[data.LOG_PROBS].device)
        return rollout


class LedScorer:
    """Scores tokens with the sharded model, on all ranks: for the canary, and log-probs that an
    environment does not know."""

    def __init__(self, loss: GRPOLoss, leader: Leader) -> None:
        self.loss, self.leader = loss, leader

    @property
    def model(self) -> nn.Module:
        return self.loss.actor_network

    @property
    def shares_prompts(self) -> bool:
        return self.loss.scorer.shares_prompts

    def __call__(self, tokens_BT: Tensor, attention_BT: Tensor, mask_BT: Tensor
                 ) -> tuple[Tensor, Tensor]:
        batch = TensorDict({}, batch_size=[len(tokens_BT)])
        batch[data.TOKENS], batch[data.ATTENTION_MASK] = tokens_BT, attention_BT
        batch[data.ASSISTANT_MASK] = mask_BT
        with self.leader.together("score"):
            return _score(self.loss, self.leader.ranks.share(batch))


@torch.no_grad()
def _score(loss: GRPOLoss, batch: TensorDictBase) -> tuple[Tensor, Tensor]:
    with evaluating(loss.actor_network):
        return loss.scorer(batch[data.TOKENS], batch[data.ATTENTION_MASK],
                           batch[data.ASSISTANT_MASK])


def _score_without_adapters(loss: GRPOLoss, ranks: Ranks, batch: TensorDictBase,
                            max_tokens: int) -> Tensor:
    with adapters_disabled(loss.actor_network):
        return score_divided(loss.scorer, batch, ranks, max_tokens=max_tokens)[0]
