"""A tiny model for the tests of a module, and a batch with every entry that some option reads."""

from __future__ import annotations

import pytest

from .batches import with_every_entry


@pytest.fixture(scope="module")
def model(make_model):
    return make_model()


@pytest.fixture(scope="module")
def batch(model, make_batch):
    return with_every_entry(make_batch(model))
