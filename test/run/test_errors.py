"""What is said of mistakes: one paragraph that names key or flag, value and fix, and no traceback.

A further mistake is a further row. Files that rows name are made by :func:`files`.
"""

from __future__ import annotations

import http.server
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ..support import STARTED_IN, free_port, started, wait_until, with_variable
from .warm import COMMANDS, REPO, Warm

HF = "inference_model.backend=transformers"
GSM8K = ("--config-name", "grpo_gsm8k", "env.task.num_test=20", "inference_model.max_tokens=16",
         HF)
OWN = ("model.name={files}/model", HF)
FLAGS = ("--model-name", "{files}/model")
SERVER = ("model.name={files}/model", "inference_model.engine=server")

#: What is typed; what the message must say, in this order.
ROWS = {
    # models
    "unknown model": (
        "grpo.py", ("model.name=no-such-org/no-such-model", HF),
        ("model.name=no-such-org/no-such-model: there is no such folder here, the cache ",
         "the hub is not asked (HF_HUB_OFFLINE=1)", "hf download no-such-org/no-such-model")),
    "path like a hub id": (
        "grpo.py", ("model.name=models/foo", HF),
        ("model.name=models/foo: there is no such folder here", "give a folder written by")),
    "no hub id": ("grpo.py", ("model.name=two words", HF), (
        "model.name=two words is neither a folder here nor the id of a model on the hub",)),
    "relative path without config.json": (
        "grpo.py", ("model.name=empty", HF), ("model.name=empty: there is no config.json",)),
    "config.json is no JSON": (
        "grpo.py", ("model.name={files}/bad_config", HF),
        ("model.name={files}/bad_config: its config.json cannot be used", "give a folder")),
    "model without weights": (
        "grpo.py", ("model.name={files}/no_weights", HF),
        ("model.name={files}/no_weights: there are no weights in that folder",)),
    "half a file of weights": (
        "grpo.py", ("model.name={files}/half", HF),
        ("model.name={files}/half: model.safetensors is damaged", "fetch or write it again")),
    "model without tokenizer": (
        "grpo.py", ("model.name={files}/no_tokenizer", HF),
        ("{files}/no_tokenizer has no tokenizer that can be read", "save one beside it")),
    "frozen model": (
        "grpo.py", (*OWN, "ref_model.name=/nowhere", "train.kl_to_ref_coeff=0.1"),
        ("ref_model.name=/nowhere: there is no such folder",)),
    # data
    "data file is missing": (
        "grpo.py", (*GSM8K, "model.name={files}/model", "env.data_path={files}"),
        ("env.data_path='{files}' has no such file (looked for {files}/train.jsonl)",)),
    "malformed line": (
        "grpo.py", (*GSM8K, "model.name={files}/model", "env.data_path={files}/bad_line"),
        ("{files}/bad_line/train.jsonl, line 2: not valid JSON",)),
    "empty data set": (
        "grpo.py", (*GSM8K, "model.name={files}/model", "env.data_path={files}/no_rows"),
        ("split 'train' is empty (source: {files}/no_rows)",)),
    "more rows than there are": (
        "grpo.py", (*GSM8K, "env.task.num_test=21", "model.name={files}/model",
                    "env.data_path={files}/data"),
        ("env.task.num_test=21, but the test split has only 20 rows; lower it",)),
    "more prompts than problems": (
        "grpo.py", (*GSM8K, "model.name={files}/model", "env.data_path={files}/data",
                    "env.num_envs=64"),
        ("env.num_envs=64 different prompts", "only 20", "lower env.num_envs")),
    # rewards
    "reward of no module": (
        "grpo.py", (*OWN, "env.reward=nowhere:good"),
        ("env.reward", "'nowhere:good'", "there is no module 'nowhere'", "PYTHONPATH")),
    "reward of no function": (
        "grpo.py", (*OWN, "env.reward=own_rewards:nothing"),
        ("env.reward", "module 'own_rewards' has no function 'nothing'")),
    "reward whose module does not compile": (
        "grpo.py", (*OWN, "env.reward=no_python:good"),
        ("env.reward=no_python:good: its module cannot be imported: SyntaxError",)),
    "reward with another signature": (
        "grpo.py", (*OWN, "env.reward=own_rewards:one_argument"),
        ("not one of", "env.max_reward_errors", "own_rewards:one_argument",
         "takes 1 positional argument but 2")),
    "reward that raises at once": (
        "grpo.py", (*OWN, "env.reward=own_rewards:raises"),
        ("not one of", "env.max_reward_errors", "RuntimeError: a fault of my own",
         "own_rewards.py:")),
    # devices and numbers
    "unknown dtype": ("grpo.py", (*OWN, "train_model.torch_dtype=float8"), (
        "train_model.torch_dtype='float8': Input should be 'auto', 'float32' or 'bfloat16'",)),
    "no GPU": ("grpo.py", (*OWN, "device=cuda"), ("device=cuda, but PyTorch sees no GPU",)),
    "counts of 0 and below": (
        "grpo.py", (*OWN, "env.num_envs=0", "env.repeats=-2", "train.total_dialog_turns=0"),
        ("has 3 errors", "env.num_envs=0: ", "env.repeats=-2: ", "train.total_dialog_turns=0: ")),
    "key without value": ("grpo.py", (*OWN, "train.seed"), (
        "train.seed: has no value; write train.seed=VALUE",)),
    "two names of a key": (
        "grpo.py", (*OWN, "+train.maxent_tau=1", "maxent.tau=2"),
        ("maxent.tau=2 and maxent.tau=1, by maxent_tau, are the same setting; give one",)),
    # folders
    "resume from what is no checkpoint": (
        "grpo.py", (*OWN, "resume={files}/model"),
        ("resume={files}/model: no checkpoint there; give a run's folder",)),
    "folder of the run": (
        "grpo.py", (*OWN, "hydra.run.dir={files}/file/run"),
        ("hydra.run.dir={files}/file/run: runs cannot be written there (Not a directory)",)),
    # servers
    "stock server": (
        "grpo.py", (*SERVER, "inference_model.url=http://127.0.0.1:{port}"),
        ("inference_model.url=http://127.0.0.1:{port}: the server takes no new weights",
         "VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server --model m",
         "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1", "python -m grpo.server.serve --model m")),
    "no server": (
        "grpo.py", (*SERVER, "inference_model.url=http://127.0.0.1:9"),
        ("inference_model.url=http://127.0.0.1:9: no server answers", "Connection refused")),
    "no address": (
        "grpo.py", (*SERVER, "inference_model.url=127.0.0.1:8000"),
        ("inference_model.url='127.0.0.1:8000' must have the form http://host:port, such as",)),
    "offline: no address": (
        "grpo-offline.py", ("model.train_id={files}/model", "generation.base_url=127.0.0.1:8000"),
        ("generation.base_url='127.0.0.1:8000' must have the form http://host:port, such as",)),
    # W&B
    "W&B without an account": (
        "grpo.py", (*OWN, "logging.backends=[wandb]"),
        ("logging.backends contains 'wandb', but W&B does not start", "wandb login",
         "logging.wandb_mode=offline")),
    # atropos-grpo and atropos-grpo-run
    "Atropos: port of a stock server": (
        "atropos-grpo", (*FLAGS, "--vllm-port", "{port}"),
        ("atropos.vllm_port (--vllm-port)={port}", "Address already in use by process {pid} (",
         "a stock vLLM does not")),
    "Atropos: port of the bridge": (
        "atropos-grpo", (*FLAGS, "--vllm-port", "{port}", "--weight-bridge-mode", "bridge", HF),
        ("atropos.vllm_port (--vllm-port)={port}", "Address already in use by process {pid} (")),
    "Atropos: port of the hub": (
        "atropos-grpo-run", (*FLAGS, "--atropos-url", "http://127.0.0.1:{port}"),
        ("--atropos-url http://127.0.0.1:{port}: no Atropos API answers there",
         "Address already in use by process {pid} (")),
    "Atropos: folder of the run": (
        "atropos-grpo", (*FLAGS, "--save-path", "{files}/file/run"),
        ("atropos.save_path (--save-path)={files}/file/run cannot be written to (Not a dir",)),
    "Atropos: folder of the logs": (
        "atropos-grpo", (*FLAGS, "--log-dir", "{files}/file/run"),
        ("atropos.log_dir (--log-dir)={files}/file/run cannot be written to",)),
    "Atropos: unknown model": (
        "atropos-grpo", ("--model-name", "no-such-org/no-such-model"),
        ("model.name (--model-name)=no-such-org/no-such-model: there is no such folder here",)),
    "Atropos: numbers": (
        "atropos-grpo", (*FLAGS, "--batch-size", "0", "--training-steps", "-1"),
        ("has 2 errors", "atropos.steps (--training-steps)=-1: ",
         "atropos.batch_size (--batch-size)=0: ")),
    "Atropos: resume": ("atropos-grpo", (*FLAGS, "--resume", "/nowhere"), (
        "resume (--resume)=/nowhere: no checkpoint there",)),
    # the asynchronous script, which has its own way to all of these
    "async: unknown model": (
        "grpo-async.py", ("model.name=no-such-org/no-such-model", HF),
        ("model.name=no-such-org/no-such-model: there is no such folder here",)),
    "async: no GPU": (
        "grpo-async.py", (*OWN, "device=cuda"), ("device=cuda, but PyTorch sees no GPU",)),
    "async: reward with another signature": (
        "grpo-async.py", (*OWN, "env.reward=own_rewards:one_argument"),
        ("not one of", "takes 1 positional argument but 2")),
}
# These start Ray, or W&B's own process.
SLOW = {"async: reward with another signature", "W&B without an account"}


@pytest.fixture(scope="module")
def warm():
    with Warm() as commands:
        yield commands


@pytest.fixture(scope="module")
def files(tmp_path_factory, model_folder) -> Path:
    """Models, data and rewards, of which most lack something."""
    root = tmp_path_factory.mktemp("files")
    shutil.copytree(model_folder, root / "model")
    lacking = {"no_weights": "model*", "no_tokenizer": "*token*", "half": "",
               "bad_config": ""}
    for name, pattern in lacking.items():
        shutil.copytree(model_folder, root / name,
                        ignore=shutil.ignore_patterns(pattern) if pattern else None)
    for file in (root / "no_tokenizer").glob("*.jinja"):
        file.unlink()
    weights = root / "half" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    (root / "bad_config" / "config.json").write_text("{no JSON")
    rows = "".join(f'{{"question": "{i}+1?", "answer": "#### {i + 1}"}}\n' for i in range(20))
    for name, train in {"data": rows, "bad_line": rows.replace("\n", "\n{no JSON\n", 1),
                        "no_rows": ""}.items():
        (root / name).mkdir()
        (root / name / "train.jsonl").write_text(train)
        (root / name / "test.jsonl").write_text(rows)
    (root / "own_rewards.py").write_text(
        "def one_argument(completion):\n    return 1.0\n\n"
        "def raises(completion, problem):\n    raise RuntimeError('a fault of my own')\n")
    (root / "no_python.py").write_text("def good(:\n")
    (root / "file").write_text("no folder")
    return root


@pytest.fixture(scope="module")
def port():
    """Of a server that has the routes of a stock vLLM, and none of ours."""
    class Stock(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = self.path in ("/health", "/v1/models")
            card = b'{"id": "m", "object": "model", "owned_by": "vllm"}'
            body = b'{"data": [%s]}' % card if self.path == "/v1/models" else b""
            self.send_response(200 if known else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Stock) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in ROWS])
def test_a_mistake_is_one_clear_paragraph(warm, files, port, tmp_path, name):
    command, argv, parts = ROWS[name]
    (tmp_path / "empty").mkdir()

    def filled(text: str) -> str:
        return text.format(files=files, port=port, pid=os.getpid()) if "{" in text else text

    done = warm.run(command, *map(filled, argv), folder=tmp_path, timeout=120,
                    PYTHONPATH=str(files), HF_HUB_OFFLINE="1", WANDB_API_KEY="", COLUMNS="200")
    assert done.code == 1, done
    assert "Traceback" not in done.out + done.err
    begin = done.err.rindex("error: ")
    message = done.err[begin:]
    assert len(message.splitlines()) <= 6, message
    for part in map(filled, parts):
        assert part in message, message
        message = message[message.index(part) + len(part):]


def test_a_hub_that_cannot_be_reached_costs_seconds(warm, tmp_path):
    """No network: what listens at the hub's address refuses."""
    done = warm.run("grpo.py", "model.name=no-such-org/no-such-model", HF, folder=tmp_path,
                    timeout=120, HF_HUB_OFFLINE="0", HTTPS_PROXY="http://127.0.0.1:9")
    assert done.code == 1
    assert "model.name=no-such-org/no-such-model" in done.err
    assert "127.0.0.1 cannot be reached: [Errno 111] Connection refused" in done.err
    assert "Traceback" not in done.err and len(done.err.splitlines()) <= 3


def line_of(command: str, *argv: str) -> list[str | Path]:
    target = COMMANDS[command]
    return [*([target] if isinstance(target, Path) else ["-m", target]), *argv]


@pytest.mark.parametrize("command, argv", [
    ("grpo.py", ()), ("grpo-async.py", ()),
    ("atropos-grpo", ("--model-name", "embedded")),
    ("atropos-grpo-run", ("--model-name", "embedded"))])
def test_ctrl_c_while_libraries_are_imported_is_one_line(tmp_path, command, argv):
    with started(line_of(command, *argv), tmp_path) as process:
        maps = Path(f"/proc/{process.pid}/maps")
        wait_until(lambda: "libtorch" in maps.read_text(), seconds=120.0, alive=process)
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert err.strip().startswith("stopped by SIGINT") and len(err.strip().splitlines()) == 1
    # The asynchronous script, which takes longest to start, says at once what it does.
    told = (r"starting Ray\nRay: there after [\d.]+ s\nloading vLLM in 1 rollout worker\n"
            r"loading PyTorch, TorchRL and Transformers\n")
    assert re.fullmatch(told if command == "grpo-async.py" else "", out)
    assert not with_variable(STARTED_IN, tmp_path)


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("command, argv", [
    ("grpo.py", ()), ("grpo.py", ("inference_model.engine=process",)),
    ("grpo.py", ("inference_model.engine=server",)), ("grpo-async.py", ()),
    ("atropos-grpo", ())])
def test_ctrl_c_while_an_engine_starts_leaves_nothing_running(files, tmp_path, command, argv):
    pytest.importorskip("vllm")
    model = str(files / "model")
    own = (f"model.name={model}",) if command.endswith(".py") else (
        "--model-name", model, "--vllm-port", str(free_port()))
    with started(line_of(command, *own, *argv), tmp_path) as process:
        while not process.stdout.readline().startswith("total"):  # of the memory that is needed
            assert process.poll() is None, process.stderr.read()
        time.sleep(5)  # into the start of the engine; it holds at any other moment, too
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 130, err
        assert err.splitlines()[-1].startswith("stopped by SIGINT") and "Traceback" not in err
        wait_until(lambda: not with_variable(STARTED_IN, tmp_path), every=0.1,
                   said=lambda: str(with_variable(STARTED_IN, tmp_path)))


@pytest.mark.parametrize("module, options", [
    ("grpo.atropos.hub_server", ()), ("grpo.server.serve", ("--model", "nowhere"))])
def test_a_server_at_a_port_in_use_says_who_has_it(port, module, options):
    for asked, said in ((port, f"Address already in use by process {os.getpid()} ("),
                        (99999, "port 99999 is none; choose one from 1 to 65535")):
        done = subprocess.run(
            [sys.executable, "-m", module, "--port", str(asked), *options], text=True, timeout=60,
            capture_output=True, env=os.environ | {"PYTHONPATH": str(REPO)})
        assert done.returncode == 2 and "Traceback" not in done.stderr
        assert said in done.stderr.splitlines()[-1]
