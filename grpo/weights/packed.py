"""Many tensors as one array of bytes: in a message a small tensor costs as much as a large one."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Packed:
    """Named tensors; as NumPy's, the bytes are not copied where a message is in shared memory.

    Attributes:
        content: their bytes, one after another.
        layout: ``(name, dtype without "torch.", shape)`` of each.

    Examples:
        >>> packed = Packed.of({"a": torch.ones(2, dtype=torch.bfloat16), "b": torch.zeros(1, 3)})
        >>> packed.content.nbytes, [name for name, *_ in packed.layout]
        (16, ['b', 'a'])
        >>> packed.tensors()["a"]
        tensor([1., 1.], dtype=torch.bfloat16)
    """

    content: np.ndarray
    layout: list[tuple[Hashable, str, tuple[int, ...]]]

    @classmethod
    @torch.no_grad()
    def of(cls, values: Mapping[Hashable, Tensor]) -> Packed:
        """A copy of the values as they are now, wherever they are."""
        # Of wide types first, so that each begins at a multiple of its width.
        ordered = sorted(values.items(), key=lambda item: -item[1].itemsize)
        layout = [(name, str(value.dtype).removeprefix("torch."), tuple(value.shape))
                  for name, value in ordered]
        parts = [value.detach().contiguous().reshape(-1).view(torch.uint8) for _, value in ordered]
        content = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)
        return cls(content.cpu().numpy(), layout)

    def tensors(self, device: torch.device | str = "cpu") -> dict[Hashable, Tensor]:
        """The values by name, on a device; they share one new piece of memory."""
        # A copy, because a message's own may not be written to.
        content = torch.from_numpy(self.content.copy()).to(device)
        found, first = {}, 0
        for name, dtype_name, shape in self.layout:
            dtype = getattr(torch, dtype_name)
            size = torch.Size(shape).numel() * dtype.itemsize
            found[name] = content[first:first + size].view(dtype).view(shape)
            first += size
        return found
