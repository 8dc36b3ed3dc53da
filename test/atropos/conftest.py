"""A hub for the tests of a file, and a client of it."""

from __future__ import annotations

import pytest

from grpo.atropos.client import AtroposClient
from grpo.atropos.hub_server import HubServer


@pytest.fixture(scope="module")
def shared():
    with HubServer() as hub:
        yield hub


@pytest.fixture
def client(shared):
    client = AtroposClient(shared.url, timeout=10.0)
    client.reset_data()
    return client
