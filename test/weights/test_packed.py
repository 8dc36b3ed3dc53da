"""Tensors that travel as one array."""

from __future__ import annotations

import pickle

import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo.weights.packed import Packed

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.int64]
shapes = st.lists(st.integers(1, 3), max_size=3)


@given(st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), max_size=6))
def test_what_arrives_is_what_was_sent_to_the_bit(entries):
    values = {f"layer.{number}": torch.randint(0, 100, shape).to(dtype)
              for number, (shape, dtype) in enumerate(entries)}
    arrived = pickle.loads(pickle.dumps(Packed.of(values))).tensors()
    assert arrived.keys() == values.keys()
    for name, value in values.items():
        assert arrived[name].dtype == value.dtype and torch.equal(arrived[name], value)


def test_it_is_a_copy_of_the_moment_also_of_parts_of_other_tensors():
    whole = torch.arange(12.0).reshape(3, 4)
    packed = Packed.of({"column": whole[:, 1], "transposed": whole.T})
    whole.zero_()
    arrived = packed.tensors()
    assert arrived["column"].tolist() == [1.0, 5.0, 9.0]
    assert arrived["transposed"].shape == (4, 3) and arrived["transposed"][3, 2] == 11
    arrived["column"].zero_()
    assert packed.tensors()["column"].tolist() == [1.0, 5.0, 9.0]
