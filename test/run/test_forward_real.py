"""An environment that ignores ``--openai.base_url``, as atroposlib's own ``gsm8k_server.py`` does,
under ``atropos-grpo-run --forward-ports``.

That one downloads its problems, so here is a stand-in: additions, with a ``config_init`` of the
same form. Where it asks is decided by unmodified atroposlib: at ``localhost:9004`` to ``9007``.
"""

from __future__ import annotations

import socket
import sys

import pytest

from grpo.atropos.forward import ATROPOSLIB_PORTS
from grpo.report.loggers import read_jsonl

from ..support import REPO, environment, finished, free_ports

pytestmark = pytest.mark.slow  # atroposlib takes seconds to import, an environment ten to start

STAND_IN = """
import sys
sys.path.insert(0, {examples!r})
from arithmetic_env import ArithmeticEnv

class Elsewhere(ArithmeticEnv):
    @classmethod
    def config_init(cls):
        config, (server,) = super().config_init()
        return config, server  # one and not a list

if __name__ == "__main__":
    Elsewhere.cli()
"""


@pytest.fixture
def free():
    """atroposlib's ports, which are the same for all of a machine."""
    for port in ATROPOSLIB_PORTS:
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            pytest.skip(f"another process of this machine listens at port {port}")


def test_an_environment_that_asks_its_own_ports_trains(tmp_path, cache, python, free):
    script = tmp_path / "elsewhere_env.py"
    script.write_text(STAND_IN.format(examples=str(REPO / "examples/atropos")))
    engine, hub = free_ports(2)
    finished(
        [sys.executable, "-m", "grpo.run.cli.launch", "--model-name", "embedded", "--env",
         str(script), "--env-python", str(python), "--atropos-url", f"http://127.0.0.1:{hub}",
         "--vllm-port", str(engine), "--weight-bridge-mode", "bridge", "--training-steps", "2",
         "--batch-size",
         "8", "--gradient-accumulation-steps", "2", "--max-model-len", "64", "--forward-ports",
         ",".join(map(str, ATROPOSLIB_PORTS)), "inference_model.backend=transformers",
         "model.warm_start_steps=20"], tmp_path, environment(cache))
    rows = read_jsonl(tmp_path / "trained_model_checkpoints" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
