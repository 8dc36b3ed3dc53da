"""The hub as atroposlib sees it: its own API tests, its environments' and its trainer's calls.

They run unmodified in a Python of their own, because atroposlib needs an older transformers; see
``conftest.py``.
"""

from __future__ import annotations

import re
import sys

import pytest

from grpo.atropos.hub_server import HubServer
from grpo.envs.tokenizer_files import save_tokenizer

from .conftest import CHECKS, REPO

API_TESTS = ("test_api_compression", "test_api_legacy", "test_api_messages_handling")
pytestmark = pytest.mark.slow


def test_its_own_api_tests_pass(peer_tests):
    modules = [f"atroposlib.tests.{name}" for name in API_TESTS]
    output = peer_tests("-p", "hub_in_place_of_run_api", "--pyargs", *modules, at_least=28,
                        PYTHONPATH=str(CHECKS), GRPO_PEER_PYTHON=sys.executable,
                        GRPO_PEER_REPO=str(REPO))
    hubs, requests = re.search(r"hubs started: (\d+), requests: (\d+)", output).groups()
    assert int(hubs) == len(API_TESTS) and int(requests) > 80


def test_its_environments_and_its_trainer_can_call_it(peer_tests, tokenizer, tmp_path):
    save_tokenizer(tokenizer, tmp_path)
    with HubServer() as hub:
        peer_tests(CHECKS / "hub_clients.py", at_least=2, PYTHONPATH=str(CHECKS),
                   GRPO_PEER_URL=hub.url, GRPO_PEER_MODEL=str(tmp_path))
