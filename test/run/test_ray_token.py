"""The Ray of a run answers to nobody who does not have the run's token."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack

import pytest

from grpo.config.asynchronous import AsyncConfig
from grpo.config.schema import load_config
from grpo.report.starting import Starting
from grpo.run.ray_token import MODE, TOKEN, TOKEN_PATH, token_of_ray

ray = pytest.importorskip("ray")
raylet = pytest.importorskip("ray._raylet")
knows_tokens = pytest.mark.skipif(not hasattr(raylet, "AuthenticationTokenLoader"),
                                  reason="needs Ray 2.52")
CLIENT = """
import sys
import ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
print("connected to", len(ray.nodes()))
"""


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    for name in (MODE, TOKEN, TOKEN_PATH):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def token() -> str:
    return raylet.AuthenticationTokenLoader.instance().get_raw_token()


@knows_tokens
def test_each_run_has_a_token_of_its_own_and_leaves_none_behind(tmp_path, unset):
    unset.setenv("HOME", str(tmp_path))
    tokens = []
    for _ in range(2):
        end = token_of_ray(own=True)
        assert os.environ[MODE] == "token" and token() == os.environ[TOKEN]
        tokens.append(token())
        end()
        assert MODE not in os.environ and TOKEN not in os.environ
    assert len(set(tokens)) == 2 and all(len(one) >= 64 for one in tokens)
    token_of_ray(own=False)()  # a cluster is not told it, and may have none
    assert raylet.get_authentication_mode() != raylet.AuthenticationMode.TOKEN
    assert not list(tmp_path.iterdir())  # nor is it written anywhere


@knows_tokens
def test_what_the_user_has_set_stays(tmp_path, unset):
    (tmp_path / "token").write_text("of-a-file")
    unset.setenv(TOKEN_PATH, str(tmp_path / "token"))
    end = token_of_ray(own=True)
    assert token() == "of-a-file" and TOKEN not in os.environ
    end()
    unset.setenv(TOKEN, "of-the-user")
    end = token_of_ray(own=True)
    assert token() == "of-the-user"
    end()
    assert os.environ[TOKEN] == "of-the-user" and os.environ[TOKEN_PATH]
    unset.setenv(MODE, "disabled")
    token_of_ray(own=True)()
    assert os.environ[MODE] == "disabled"
    assert raylet.get_authentication_mode() != raylet.AuthenticationMode.TOKEN


def test_a_ray_that_knows_no_tokens_is_started_without_one(unset):
    unset.delattr(raylet, "AuthenticationTokenLoader", raising=False)
    token_of_ray(own=True)()
    assert MODE not in os.environ and TOKEN not in os.environ


@pytest.mark.slow
@knows_tokens
def test_a_client_without_the_token_is_refused(tmp_path):
    from grpo.run.build_async import open_ray

    def client(**variables: str) -> subprocess.CompletedProcess:
        environment = {name: value for name, value in os.environ.items()
                       if name not in (MODE, TOKEN, TOKEN_PATH)}
        return subprocess.run([sys.executable, "-c", CLIENT, address], timeout=200, text=True,
                              env=environment | {"HOME": str(tmp_path)} | variables,
                              capture_output=True, check=False)

    with ExitStack() as at_end:
        open_ray(load_config({"device": "cpu"}, AsyncConfig), at_end, Starting(print))
        address, own = ray.get_runtime_context().gcs_address, token()
        known = client(**{MODE: "token", TOKEN: own})
        assert "connected to 1" in known.stdout, known.stderr
        for variables in ({}, {MODE: "disabled"}, {MODE: "token", TOKEN: own[::-1]}):
            refused = client(**variables)
            assert refused.returncode and "connected" not in refused.stdout, variables
            assert "uthenticat" in refused.stderr, (variables, refused.stderr)
    assert MODE not in os.environ and TOKEN not in os.environ
