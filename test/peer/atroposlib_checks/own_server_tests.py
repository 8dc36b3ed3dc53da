"""atroposlib's tests of an inference server, collected from its wheel.

They start a server script and ask it through atroposlib's proxy, server manager and vLLM client.
Only the server is another one: ours, which runs already, with its own small model.
"""

from __future__ import annotations

import os

import pytest
from atroposlib.tests import test_managed_server_proxy_integration as theirs
from atroposlib.tests.test_managed_server_proxy_integration import *  # noqa: F403

theirs.VLLM_MODEL = theirs.PROXY_MODEL = os.environ["GRPO_PEER_MODEL"]
theirs.VLLM_BASE_URL = os.environ["GRPO_PEER_URL"] + "/v1"


@pytest.fixture(scope="module")
def vllm_backend():
    """In place of the fixture that starts their server on a port of its own."""
