"""One server around the stand-in engine a test file."""

from __future__ import annotations

import pytest

from .serving import server


@pytest.fixture(scope="module")
def shared():
    with server(info={"max_lora_rank": 8}) as (engine, client):
        yield engine, client


@pytest.fixture
def client(shared):
    yield shared[1]
    shared[1].resume()


@pytest.fixture
def engine(shared):
    return shared[0]
