"""On a GPU: fingerprints are those of the CPU, and cost little."""

from __future__ import annotations

import time

import pytest
import torch

from grpo.weights.fingerprint import Part, fingerprint, fingerprints
from grpo.weights.proof import Perturbation

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def needs_gpu():
    if not torch.cuda.is_available():
        pytest.skip("no GPU")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(1,), (7,), (129, 33), (1536, 8960), (151_936, 300)])
def test_fingerprints_agree_with_the_cpu_to_the_bit(dtype, shape):
    values = torch.randint(-2**31, 2**31, shape).to(dtype)
    here = values.cuda()
    assert fingerprint(here) == fingerprint(values)
    part = (slice(None), slice(3, 17)) if len(shape) > 1 else slice(0, 1)
    assert fingerprint(here[part]) == fingerprint(values[part])
    here.view(-1).view(torch.uint8)[-1:].bitwise_xor_(1)
    assert fingerprint(here) != fingerprint(values)


def test_three_gigabytes_take_milliseconds_and_one_wait():
    tensors = [torch.randn(8960, 1536, device="cuda", dtype=torch.bfloat16) for _ in range(112)]
    fingerprints(tensors[:1])
    torch.cuda.synchronize()
    start = time.perf_counter()
    fingerprints(tensors)
    whole = time.perf_counter() - start
    start = time.perf_counter()
    fingerprints(Part(3, 10).choose(tensors))
    part = time.perf_counter() - start
    # At most 1 % of a step of 2.2 s for both sides, one after the other.
    assert 2 * part < 0.011 and whole < 0.1, (whole, part)


def test_changes_of_the_self_test_go_without_a_trace():
    param = torch.nn.Parameter(torch.randn(8960, 1536, device="cuda", dtype=torch.bfloat16))
    before = fingerprint(param)
    change = Perturbation([param])
    assert fingerprint(param) != before
    change.undo()
    assert fingerprint(param) == before
