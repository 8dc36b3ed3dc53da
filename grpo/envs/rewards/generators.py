"""The random generators that all code of a process shares."""

from __future__ import annotations

import random

import numpy as np
import torch


class GlobalGenerators:
    """The states of ``random``, NumPy and PyTorch (with the current GPU, if in use) at one moment.

    Examples:
        >>> generators = GlobalGenerators()
        >>> first = random.random()
        >>> generators.drawn()
        True
        >>> generators.restore()
        >>> generators.drawn(), random.random() == first
        (False, True)
    """

    def __init__(self) -> None:
        self.python, self.numpy = random.getstate(), np.random.get_state()
        self.torch = torch.get_rng_state()
        self.cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None

    def drawn(self) -> bool:
        """Whether anything has been drawn or seeded since."""
        now = GlobalGenerators()
        return not (self.python == now.python and self.torch.equal(now.torch)
                    and all(map(np.array_equal, self.numpy, now.numpy))
                    and (self.cuda is None or self.cuda.equal(now.cuda)))

    def restore(self) -> None:
        """Go back to these states."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.torch)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda)
