"""Commands of docs/commands.md that start vLLM, Ray or an API, with what is to be beside them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo.envs.embedded import EmbeddedSpec, embedded_model
from grpo.envs.tasks import make_task
from grpo.report.legacy_names import LEGACY_NAMES
from grpo.report.loggers import read_jsonl

from ..support import REPO, environment, finished, free_ports, wait_until
from .commands_page import Line
from .test_commands import MODEL, SMALLER, check_run, named, of_kind

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

SHORT = ["--training-steps", "1", "--max-model-len", "64", "--checkpoint-interval", "1"]
#: A share of a GPU, as a CPU has it.
CACHE = ["--kv-cache-memory-bytes", str(64 << 20)]
FLOAT32 = ["--dtype", "float32"]  # which trainers have on a CPU

#: In the place of Slurm's: runs the job's script here, as if it were on the first of its nodes.
SBATCH = """#!/usr/bin/env bash
set -euo pipefail
export SLURM_NNODES=1 SLURM_JOB_ID=1 SLURM_JOB_NODELIST=nodes SLURM_SUBMIT_DIR=$PWD
while [[ $1 == --* ]]; do
    [[ $1 == --nodes=* ]] && SLURM_NNODES=${1#*=}
    shift
done
exec bash "$@"
"""
#: Each other node is one more of Ray's on this machine.
SRUN = """#!/usr/bin/env bash
while [[ $1 == -* ]]; do [[ $1 == -w ]] && shift; shift; done
exec "$@"
"""
STAND_INS = {"sbatch": SBATCH, "srun": SRUN, "hostname": "#!/usr/bin/env bash\necho 127.0.0.1\n",
             "scontrol": "#!/usr/bin/env bash\nprintf 'node1\\nnode2\\n'\n"}


class Terminals:
    """Commands of the page side by side, in a folder like a reader's."""

    def __init__(self, folder: Path, model: str, python: Path | None, env: dict[str, str]) -> None:
        self.folder, self.env = folder, env
        self.api, self.engine = free_ports(2)
        here = {"python": [sys.executable], "atropos-grpo": [sys.executable, "-m",
                                                            "grpo.run.cli.atropos"],
                "atropos-grpo-run": [sys.executable, "-m", "grpo.run.cli.launch"]}
        if python is not None:
            here |= {".venv-atropos/bin/python": [str(python)],
                     ".venv-atropos/bin/run-api": [str(python.with_name("run-api"))]}
        self._programs = here
        self._words = {MODEL: model, "/tmp/": f"{folder}/", "localhost:8000":
                       f"localhost:{self.api}", "127.0.0.1:8000": f"127.0.0.1:{self.engine}",
                       "localhost:9001": f"localhost:{self.engine}",
                       "path/to/environment.py": str(REPO / "examples/atropos/arithmetic_env.py"),
                       "sota-implementations/": f"{REPO}/sota-implementations/",
                       "examples/slurm/": f"{REPO}/examples/slurm/"}
        self._started: dict[str, subprocess.Popen] = {}

    def command(self, text: str, *more: str) -> tuple[list[str], dict[str, str]]:
        """A line with what the reader has replaced, and its environment."""
        variables, (program, *words) = Line.of(text)
        if "--gpu-memory-utilization" in words:
            place = words.index("--gpu-memory-utilization")
            words[place:place + 2] = CACHE
        if "--port" in words:
            port = self.engine if "grpo.server.serve" in words else self.api
            words[words.index("--port") + 1] = str(port)
        for flag, value in (("--atropos-url", f"http://localhost:{self.api}"),
                            ("--vllm-port", str(self.engine))):
            if program.startswith("atropos-grpo"):
                more = (*more, flag, value)
        return ([*self._programs.get(program, [self._own(program)]), *map(self._own, words), *more],
                self.env | {name: self._own(value) for name, value in variables.items()})

    def _own(self, word: str) -> str:
        # In one pass: a folder of ours may have in it what stands on the page.
        return re.sub("|".join(map(re.escape, self._words)), lambda said: self._words[said[0]],
                      word)

    def start(self, text: str, *more: str) -> None:
        """In a terminal of its own, until the test ends."""
        command, env = self.command(text, *more)
        with (self.folder / f"terminal{len(self._started)}.log").open("w") as log:
            self._started[text] = subprocess.Popen(command, cwd=self.folder, env=env, stdout=log,
                                                   stderr=subprocess.STDOUT)

    def run(self, text: str, *more: str) -> str:
        """Output of a line that has ended well."""
        command, env = self.command(text, *more)
        try:
            return finished(command, self.folder, env)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.said()}") from None

    def answer(self, port: int, path: str) -> None:
        """Wait until something does."""
        def answers() -> bool:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5)
            except OSError:  # also where it answers with an error
                return False
            return True

        wait_until(answers, seconds=200.0, every=0.2, said=self.said)

    def said(self) -> str:
        """The last lines of the other terminals."""
        return "\n".join(f"{text[:70]}\n{log.read_text()[-1500:]}" for text, log in zip(
            self._started, sorted(self.folder.glob("terminal*.log")), strict=True))

    def end(self) -> None:
        for process in reversed(self._started.values()):
            process.terminate()
        for process in self._started.values():
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()


@pytest.fixture
def small_env(cache) -> dict[str, str]:
    pytest.importorskip("vllm")
    return environment(cache, COLUMNS="100")


@pytest.fixture
def terminals(tmp_path, cache, small_env, python) -> Iterator[Terminals]:
    model = str(embedded_model(make_task("arithmetic"), EmbeddedSpec(),
                               cache_dir=cache / "torchrl-grpo"))
    terminals = Terminals(tmp_path, model, python, small_env)
    yield terminals
    terminals.end()


def check_atropos(folder: Path, *, adapters: bool) -> dict[str, float]:
    """The metrics of the one step of a run that has left all that it should."""
    saved = folder / "trained_model_checkpoints"
    (row,) = [row for row in read_jsonl(saved / "metrics.jsonl") if row["step"] > 0]
    assert row["step"] == 1 and row["train/grad_norm"] > 0
    kind = "adapter" if adapters else "model"
    assert {f"final_{kind}", "adapter_step_1" if adapters else "step_1", "checkpoints"} <= {
        path.name for path in saved.iterdir()}
    return row


@pytest.mark.parametrize("number, row", list(enumerate(of_kind("trainer"))),
                         ids=map(named, of_kind("trainer")))
def test_an_atropos_trainer_runs_beside_api_and_environment(number, row, terminals):
    apis, environments = of_kind("api"), of_kind("environment")
    (api,), (env,) = apis[number % len(apis)].here, environments[number % len(environments)].here
    *servers, trainer = row.here
    for text in servers:
        terminals.start(text, "--max-model-len", "64", "--max-num-seqs", "32", *FLOAT32)
    terminals.start(api)
    # As the page says; a trainer that finds no engine would start one.
    terminals.answer(terminals.api, "/status")
    terminals.start(env)
    if servers:
        terminals.answer(terminals.engine, "/health")
    terminals.run(trainer, *SHORT)
    check_atropos(terminals.folder, adapters="lora" in trainer)
    logged = terminals.folder / "grpo_training"
    assert logged.is_dir() == ("/tmp/grpo_training" in "".join(row.here))


@pytest.mark.parametrize("row", of_kind("launcher"), ids=named)
def test_an_atropos_launcher_runs(row, terminals, python):
    terminals.run(row.here[0], *SHORT, "--env-python", str(python), "--env-flag",
                  "env.group_size=4", "logging.legacy_names=atropos")
    logged = check_atropos(terminals.folder, adapters=False)
    for theirs, ours in LEGACY_NAMES["atropos"].items():
        assert logged[theirs] == logged[ours], theirs


# -- Slurm, and servers ----------------------------------------------------------------------------


@pytest.fixture
def launched(tmp_path, small_env, model_folder, gsm8k_rows) -> Iterator[Terminals]:
    """Terminals with a model that has room for 2,048 tokens, and stand-ins for Slurm."""
    model, programs = tmp_path / "model", tmp_path / "bin"
    shutil.copytree(model_folder, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    programs.mkdir()
    for name, text in STAND_INS.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    scripts = Path(sys.executable).parent
    terminals = Terminals(tmp_path, str(model), None, small_env | {
        "PATH": f"{programs}:{scripts}:{small_env['PATH']}", "GRPO_REPO": str(REPO),
        "PYTHON": sys.executable, "RAY_PORT": str(free_ports(1)[0])})
    terminals.env["VLLM_PORT"] = str(terminals.engine)
    terminals.env["VLLM_MODEL"] = str(model)  # where a line has the default
    terminals.smaller = [*SMALLER, f"env.data_path={gsm8k_rows}", "hydra.run.dir=run"]
    yield terminals
    terminals.end()


@pytest.mark.parametrize("row", of_kind("local"), ids=named)
def test_a_launcher_for_one_machine_runs(row, launched):
    launched.run(row.here[0].replace("VLLM_PORT=8000", f"VLLM_PORT={launched.engine}"),
                 *launched.smaller)
    trained = check_run(launched.folder / "run")
    assert ("advantage/weight_entropy" in trained[-1]) == ("MAXENT=1" in row.here[0])
    assert all((launched.folder / "logs" / f"{name}.log").stat().st_size
               for name in ("server", "trainer"))


@pytest.mark.parametrize("row", of_kind("job"), ids=named)
def test_a_job_runs(row, launched):
    nodes = "--nodes" in row.here[0]
    # On a CPU an engine is one process.
    launched.run(row.here[0].replace("VLLM_TP_SIZE=2", "VLLM_TP_SIZE=1"), *launched.smaller,
                 *["inference_model.backend=transformers"] * nodes)
    check_run(launched.folder / "run")
    logs = {path.name for path in (launched.folder / "slurm-1").iterdir()}
    assert logs >= ({"ray-head.log", "trainer.log"} if nodes else {"server.log", "trainer.log"})


@pytest.mark.parametrize("row", of_kind("served"), ids=named)
def test_a_run_with_a_server_beside_it_runs(row, launched):
    *servers, trainer = row.here
    for text in servers:
        launched.start(text, "--max-model-len", "256", *FLOAT32)
    launched.answer(launched.engine, "/health")
    launched.run(trainer, *launched.smaller)
    check_run(launched.folder / "run")
