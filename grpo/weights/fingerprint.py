"""A short number that two processes can compute of the same memory and compare."""

from __future__ import annotations

import torch
from torch import Tensor

# Finaliser of SplitMix64 (Steele, Lea, Flood 2014) and its increment, as signed 64-bit integers.
_INCREMENT = 0x9E3779B97F4A7C15 - 2**64
_MIXERS = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64), (31, 1))
# Words hashed at a time: temporaries take three times their 8 bytes.
_CHUNK = 1 << 20


@torch.no_grad()
def fingerprint(tensor: Tensor) -> list:
    """Hash of a tensor's bytes and the sum of its values, computed on its device.

    Every 8-byte word is mixed with its position by a bijection and the results are added modulo
    2^64. The order of addition does not matter, so CPU and GPU agree to the bit, and two tensors
    that differ in a single word never collide.

    Args:
        tensor: any shape, any dtype that can be summed.

    Returns:
        ``[hash, sum]``: 16 hexadecimal digits, and a float for people to read.

    Examples:
        >>> a, b = torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])
        >>> fingerprint(a) == fingerprint(a.clone()), fingerprint(a)[0] == fingerprint(b)[0]
        (True, False)
        >>> fingerprint(b)[1]
        3.0
    """
    flat = tensor.detach().contiguous().view(-1)
    if flat.storage_offset() * flat.element_size() % 8:
        flat = flat.clone()  # words must start at multiples of their size
    raw = flat.view(torch.uint8)
    total = raw.numel()
    for start in range(0, raw.numel(), 8 * _CHUNK):
        total += _hash_words(raw[start : start + 8 * _CHUNK], first=start // 8)
    return [f"{total % 2**64:016x}", flat.sum(dtype=torch.float64).item()]


def _hash_words(raw: Tensor, *, first: int) -> int:
    if missing := -raw.numel() % 8:
        raw = torch.nn.functional.pad(raw, (0, missing))
    words = raw.view(torch.int64)
    mixed = torch.arange(first, first + words.numel(), device=raw.device).mul_(_INCREMENT)
    mixed.add_(words)
    for shift, factor in _MIXERS:
        # Shifting is arithmetic: mask the copies of the sign away.
        mixed.bitwise_xor_((mixed >> shift).bitwise_and_((1 << 64 - shift) - 1)).mul_(factor)
    return int(mixed.sum())
