"""The hub as atroposlib sees it: its own API tests, its environments' and its trainer's calls.

They run unmodified in a Python of their own, because atroposlib needs an older transformers; see
``conftest.py``.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from grpo.atropos.hub_server import HubServer

REPO = Path(__file__).parents[2]
CHECKS = Path(__file__).parent / "atroposlib_checks"
API_TESTS = ("test_api_compression", "test_api_legacy", "test_api_messages_handling")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(python, tmp_path_factory):
    """Run atroposlib's pytest; returns what it printed."""
    folder = tmp_path_factory.mktemp("peer")
    (folder / "empty.ini").write_text("[pytest]\nasyncio_mode = auto\n")

    def run(*targets, at_least, **variables):
        completed = subprocess.run(
            [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c",
             str(folder / "empty.ini"), "--confcutdir", str(CHECKS), "--import-mode=importlib",
             *targets],
            cwd=folder, capture_output=True, text=True, timeout=200,
            env=os.environ | {"PYTHONPATH": str(CHECKS), "HF_HUB_OFFLINE": "1"} | variables)
        assert completed.returncode == 0, completed.stdout + completed.stderr
        passed = re.search(r"(\d+) passed", completed.stdout)
        assert passed and int(passed[1]) >= at_least, completed.stdout
        assert "skipped" not in completed.stdout, completed.stdout
        return completed.stdout

    return run


def test_its_own_api_tests_pass(run):
    modules = [f"atroposlib.tests.{name}" for name in API_TESTS]
    output = run("-p", "hub_in_place_of_run_api", "--pyargs", *modules, at_least=28,
                 GRPO_PEER_PYTHON=sys.executable, GRPO_PEER_REPO=str(REPO))
    hubs, requests = re.search(r"hubs started: (\d+), requests: (\d+)", output).groups()
    assert int(hubs) == len(API_TESTS) and int(requests) > 80


def test_its_environments_and_its_trainer_can_call_it(run, tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {
        "tokenizer_class": "PreTrainedTokenizerFast"}))
    with HubServer() as hub:
        run(str(CHECKS / "hub_clients.py"), at_least=2, GRPO_PEER_URL=hub.url,
            GRPO_PEER_MODEL=str(tmp_path))
