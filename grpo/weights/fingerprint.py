"""A short number that two processes can compute of the same memory and compare."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

Item = TypeVar("Item")

# Finaliser of SplitMix64 (Steele, Lea, Flood 2014) and its increment, as signed 64-bit integers.
_INCREMENT = 0x9E3779B97F4A7C15 - 2**64
_MIXERS = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64), (31, 1))
# Words hashed at a time: one temporary of 8 bytes each, small enough for a GPU's cache.
_CHUNK = 1 << 21


@dataclass(frozen=True)
class Part:
    """Some of a list: every ``of``-th entry, from entry ``number`` on.

    Attributes:
        number: of this part, below ``of``.
        of: how many parts make up the whole.

    Examples:
        >>> Part(1, 3).choose("abcdefg"), ALL.choose("ab")
        (['b', 'e'], ['a', 'b'])
    """

    number: int = 0
    of: int = 1

    def choose(self, items: Iterable[Item]) -> list[Item]:
        """The entries that belong to this part, in their order."""
        return list(items)[self.number::self.of]


#: The part that is the whole.
ALL = Part()


def fingerprint(tensor: Tensor) -> str:
    """Hash of a tensor's bytes, see :func:`fingerprints`.

    Examples:
        >>> a, b = torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])
        >>> fingerprint(a) == fingerprint(a.clone()), fingerprint(a) == fingerprint(b)
        (True, False)
    """
    return fingerprints([tensor])[0]


@torch.no_grad()
def fingerprints(tensors: Iterable[Tensor]) -> list[str]:
    """Hashes of some tensors' bytes, computed where they are and read back once, at the end.

    Every 8-byte word is mixed by a bijection, multiplied by an odd key that belongs to its
    position, and the products are added modulo 2^64. The order of addition does not matter, so CPU
    and GPU agree to the bit, and two tensors that differ in a single word never collide.

    Args:
        tensors: of any shape, dtype and device; taken one at a time.

    Returns:
        16 hexadecimal digits for each.
    """
    totals = [_total(tensor) for tensor in tensors]
    numbers: dict[int, int] = {}
    for device in {total.device for total in totals}:
        of_device = [i for i, total in enumerate(totals) if total.device == device]
        read = torch.stack([totals[i] for i in of_device]).tolist()
        numbers |= zip(of_device, read, strict=True)
    return [f"{numbers[i] % 2**64:016x}" for i in range(len(totals))]


def _total(tensor: Tensor) -> Tensor:
    """The hash as an int64 scalar on the tensor's device, which nobody has waited for."""
    flat = tensor.detach().contiguous().view(-1)
    if flat.storage_offset() * flat.element_size() % 8:
        flat = flat.clone()  # words must start at multiples of their size
    raw = flat.view(torch.uint8)
    sums = [_hash_words(raw[start : start + 8 * _CHUNK])
            for start in range(0, raw.numel(), 8 * _CHUNK)]
    if not sums:
        return torch.zeros((), dtype=torch.int64, device=raw.device)
    # The keys have no order of their own, so they serve for chunks as they do for words.
    total = sums[0] if len(sums) == 1 else (torch.stack(sums) * _keys(raw.device)[:len(sums)]).sum()
    return total + raw.numel()


def _hash_words(raw: Tensor) -> Tensor:
    if missing := -raw.numel() % 8:
        raw = torch.nn.functional.pad(raw, (0, missing))
    words = raw.view(torch.int64)
    mixed = words * _MIXERS[0][1]
    low, high = mixed.view(torch.int32).view(-1, 2).unbind(1)
    low.bitwise_xor_(high)  # what only differs in the upper half of a word differs in both
    return mixed.mul_(_keys(raw.device)[:len(words)]).sum()


@functools.cache
def _keys(device: torch.device) -> Tensor:
    """An odd number for each position of a chunk, the same on every device."""
    mixed = torch.arange(1, _CHUNK + 1, device=device).mul_(_INCREMENT)
    for shift, factor in _MIXERS:
        # Shifting is arithmetic: mask the copies of the sign away.
        mixed.bitwise_xor_((mixed >> shift).bitwise_and_((1 << 64 - shift) - 1)).mul_(factor)
    return mixed.bitwise_or_(1)
