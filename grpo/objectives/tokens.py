"""The tokens that enter the loss, without any padding: what every objective computes on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

#: Nats beyond which a log-ratio does not change the ratio any more, as in verl and OpenRLHF.
MAX_LOG_RATIO = 20.0


def bounded_ratio(log_ratio: Tensor) -> Tensor:
    """``exp(log_ratio)``, constant and without gradient beyond 20 nats on either side.

    The exponential overflows float32 at 88 nats. A clip would still make the term finite, but its
    gradient would be that of the clip, 0, times infinity.

    Examples:
        >>> log_ratio = torch.tensor([0.0, 100.0, -100.0], requires_grad=True)
        >>> bounded_ratio(log_ratio).sum().backward()
        >>> log_ratio.grad.tolist()
        [1.0, 0.0, 0.0]
    """
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


@dataclass(frozen=True)
class LossTokens:
    """The tokens of some sequences that enter the loss, laid end to end.

    There is no padding and no prompt in here, so nothing can be averaged over them by mistake.
    Sequences stay whole wherever an objective compares the tokens of one.

    Attributes:
        log_probs_N: ``[N]``, log-prob of each token under the current policy, with gradient.
        old_log_probs_N: ``[N]``, under the policy that the ratio is taken to.
        advantage_N: ``[N]``.
        row_N: int64 ``[N]``, ascending: the sequence (0 to ``num_rows - 1``) of each token.
        num_rows: number of sequences ``R``; some may have no token.
        group_R: int64 ``[R]``, prompt of each sequence, where the batch tells.
        listwise_weight_R: ``[R]``, share of each sequence in its group, for objectives of groups.

    Examples:
        >>> tokens = LossTokens(
        ...     log_probs_N=torch.tensor([-1.0, -2.0, -3.0]), old_log_probs_N=torch.zeros(3),
        ...     advantage_N=torch.ones(3), row_N=torch.tensor([0, 0, 1]), num_rows=2)
        >>> tokens.row_mean(tokens.log_ratio_N).tolist()
        [-1.5, -3.0]
        >>> tokens.of_row(torch.tensor([5.0, 7.0])).tolist()
        [5.0, 5.0, 7.0]
    """

    log_probs_N: Tensor
    old_log_probs_N: Tensor
    advantage_N: Tensor
    row_N: Tensor
    num_rows: int
    group_R: Tensor | None = None
    listwise_weight_R: Tensor | None = None

    @property
    def log_ratio_N(self) -> Tensor:
        """Current minus old log-prob, ``[N]``, as it is."""
        return self.log_probs_N - self.old_log_probs_N

    @property
    def ratio_N(self) -> Tensor:
        """Current over old probability, ``[N]``; see :func:`bounded_ratio`."""
        return bounded_ratio(self.log_ratio_N)

    @property
    def length_R(self) -> Tensor:
        """Tokens of each sequence, int64 ``[R]``."""
        # index_add, because bincount would wait for the GPU.
        ones_N = torch.ones_like(self.row_N)
        return ones_N.new_zeros(self.num_rows).index_add(0, self.row_N, ones_N)

    def row_sum(self, values_N: Tensor) -> Tensor:
        """Sum of each sequence, ``[R]``; 0 for one without tokens."""
        return values_N.new_zeros(self.num_rows).index_add(0, self.row_N, values_N)

    def row_mean(self, values_N: Tensor) -> Tensor:
        """Mean over the tokens of each sequence, ``[R]``; 0 for one without tokens."""
        return self.row_sum(values_N) / self.length_R.clamp(min=1)

    def of_row(self, values_R: Tensor) -> Tensor:
        """The value of its sequence for each token, ``[N]``."""
        return values_R[self.row_N]
