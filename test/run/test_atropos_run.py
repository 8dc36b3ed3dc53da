"""``atropos-grpo`` from the command line to the files it leaves, without vLLM: environments in
threads, a hub, and the policy of this process."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from grpo.atropos.client import AtroposClient
from grpo.atropos.hub_server import HubServer
from grpo.atropos.silence import SilenceCheck
from grpo.config.schema import ConfigError
from grpo.report.loggers import read_jsonl
from grpo.run import beside
from grpo.run.beside import troubles_of
from grpo.run.cli import atropos, launch
from grpo.run.cli.flags import to_config
from grpo.training.checkpoint import list_checkpoints

from ..atropos.environments import Environment, playing
from ..atropos.groups import env_registration
from ..support import free_port, free_ports, wait_until
from .atropos_trainer import atropos_trainer

WANTED = range(2, 100)  # of 258 tokens


class ToHub:
    """Where the environments of the tests send their groups; a teacher may add its opinion."""

    def __init__(self, url: str, *, teacher: int | None = None) -> None:
        self.client, self.teacher = AtroposClient(url), teacher

    def send(self, group: dict) -> None:
        if self.teacher is not None:
            group["distill_token_ids"] = [[[self.teacher, 3]] * len(row) for row in group["tokens"]]
            group["distill_logprobs"] = [[[-0.01, -5.0]] * len(row) for row in group["tokens"]]
        self.client.send(group)


def wanted(tokens: list[int]) -> float:
    return sum(token in WANTED for token in tokens) / len(tokens)


@torch.no_grad()
def chance_of(model, tokens: range) -> float:
    """Probability of one of some tokens after prompts such as the environments'."""
    prompts = torch.randint(10, 61, (64, 4), generator=torch.Generator().manual_seed(0))
    probs = model.eval()(prompts).logits[:, -1].softmax(-1)
    return probs[:, tokens.start : tokens.stop].sum(-1).mean().item()


@pytest.fixture
def command(tmp_path, small_folder, monkeypatch):
    """Run the command with a hub and environments; returns what it wrote."""
    monkeypatch.setattr("grpo.report.reporter.write_report", lambda run_dir, **_: run_dir)

    def call(*argv: str, teacher: int | None = None, name: str = "run", asked: int | None = None):
        port = free_port()
        with HubServer() as hub, running(asked or port, ToHub(hub.url, teacher=teacher)):
            atropos.main([
                "--model", str(small_folder), "--weight-bridge-mode", "bridge", "--atropos-url",
                hub.url, "--vllm-port", str(port), "--save-path", str(tmp_path / name),
                "--group-timeout", "60", "--max-model-len", "48", "--batch-size", "6",
                "--gradient-accumulation-steps", "2",
                "inference_model.backend=transformers", *argv])
        return tmp_path / name

    return call


@contextmanager
def running(port: int, hub: ToHub):
    environments = [
        Patient(f"http://127.0.0.1:{port}", hub, seed=seed, turns=1,
                dropped=0.1, score=wanted, group_size=6) for seed in range(2)]
    with playing(environments):
        yield


class Patient(Environment):
    """Waits for the engine, as atroposlib's environments do, and ends with it."""

    def run(self) -> None:
        while not self.client.alive() and not self.stopped.is_set():
            self.stopped.wait(0.05)
        try:
            while not self.stopped.is_set():
                self.episode()
        except RuntimeError:  # the trainer has finished
            pass


def test_a_run_learns_and_leaves_what_others_look_for(command, small_folder):
    folder = command("--training-steps", "24", "--lr", "2e-2", "--checkpoint-interval", "12",
                     "--max-staleness", "3", "--dump-batch", "--batch-size", "12")
    rows = read_jsonl(folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == [*range(1, 25)]
    for name in ("policy/ratio_mean", "policy/kl_to_inference", "policy/clip_fraction",
                 "loss/total", "train/grad_norm", "policy/log_prob_diff_mean",
                 "policy/log_prob_diff_abs_mean", "policy/log_prob_diff_abs_max",
                 "policy/log_prob_mean", "policy/log_prob_std", "policy/sampled_log_prob_mean",
                 "policy/sampled_log_prob_std", "advantage/positive_rows",
                 "advantage/negative_rows", "time/step", "time/train", "canary/max_abs_diff"):
        assert all(isinstance(row[name], (int, float)) for row in rows), name
    assert rows[0]["policy/log_prob_diff_abs_max"] < 1e-4  # the first batch is on-policy
    names = {path.name for path in folder.iterdir() if path.is_dir()}
    assert {"step_12", "step_24", "final_model", "tokenizer", "checkpoints"} <= names
    final, start = (AutoModelForCausalLM.from_pretrained(path) for path in
                    (folder / "final_model", small_folder))
    assert chance_of(final, WANTED) > chance_of(start, WANTED) + 0.04
    exported = AutoModelForCausalLM.from_pretrained(folder / "step_24")
    assert all(torch.equal(a, b) for a, b in
               zip(exported.parameters(), final.parameters(), strict=True))
    dumped = json.loads((folder / "temp.json").read_text())["batch"]
    assert sum(len(group["tokens"]) for group in dumped) <= 24
    assert all(len(g["tokens"]) == len(g["scores"]) == len(g["masks"]) for g in dumped)


def test_the_benchmark_and_the_loading_table_are_shown(command, capsys):
    command("--training-steps", "1", "--benchmark", "--debug-loading")
    shown = capsys.readouterr().out
    assert "tokens a second: median" in shown and "phase" in shown
    assert "model.layers.1.mlp.up_proj.weight  [16, 16]  float32  cpu" in shown


def test_adapters_are_trained_where_the_key_says_so(command):
    folder = command("--training-steps", "2", "--checkpoint-interval", "1",
                     "train_model.lora.enabled=true", "train_model.lora.r=2")
    names = {path.name for path in folder.iterdir() if path.is_dir()}
    assert {"adapter_step_1", "adapter_step_2", "final_adapter"} <= names
    assert not {"step_1", "final_model"} & names


def test_a_run_goes_on_from_its_checkpoint(command):
    command("--training-steps", "2", "--checkpoint-interval", "1")
    folder = command("--training-steps", "4", "--checkpoint-interval", "1", "--resume", "auto")
    assert [row["step"] for row in read_jsonl(folder / "metrics.jsonl")] == [1, 2, 3, 4]
    assert list_checkpoints(folder)[-1].step == 4
    assert {f"step_{k}" for k in (1, 2, 3, 4)} <= {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_command_with_its_code_and_the_run_goes_on(command, tmp_path, number):
    metrics = tmp_path / "run" / "metrics.jsonl"

    def send() -> None:
        wait_until(lambda: len(read_jsonl(metrics)) >= 2, seconds=60.0)
        os.kill(os.getpid(), number)

    sender = threading.Thread(target=send)
    sender.start()
    with pytest.raises(SystemExit) as raised:
        command("--training-steps", "500", "--checkpoint-interval", "0")
    sender.join()
    assert raised.value.code == 128 + number
    (saved,) = list_checkpoints(tmp_path / "run")
    assert saved.step == read_jsonl(metrics)[-1]["step"]
    command("--training-steps", str(saved.step + 1), "--checkpoint-interval", "0", "--resume",
            "auto")
    assert [row["step"] for row in read_jsonl(metrics)] == [*range(1, saved.step + 2)]


@pytest.mark.parametrize("module", ["atropos", "launch"])
def test_ctrl_c_while_a_command_is_being_imported_is_no_traceback(module):
    code = f"import _thread, grpo.run.cli; _thread.interrupt_main(); import grpo.run.cli.{module}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "\nstopped by SIGINT\n")


def test_another_run_is_not_written_over(command):
    command("--training-steps", "1")
    with pytest.raises(SystemExit, match="already holds the metrics of a run"):
        command("--training-steps", "1")


def test_frozen_layers_do_not_move(command, small_folder):
    folder = command("--training-steps", "2", "--lr", "1e-2", "--train-layer-indices", "1")
    final, start = (dict(AutoModelForCausalLM.from_pretrained(path).named_parameters())
                    for path in (folder / "final_model", small_folder))
    moved = {name for name in final if not torch.equal(final[name], start[name])}
    assert moved and all(name.startswith("model.layers.1.") for name in moved)


def test_another_optimizer_trains(command):
    folder = command("--training-steps", "3", "--optimizer", "adafactor",
                     "--adafactor-relative-step")
    rows = read_jsonl(folder / "metrics.jsonl")
    assert [row["train/lr"] for row in rows] == [0.01, 0.01, 0.01]


def test_another_temperature_than_the_environments_is_an_error_that_says_so(command):
    with pytest.raises(SystemExit, match=r"sampled at temperature 1 .*inference_model.temperature "
                                         r"\(--temperature\)"):
        command("--training-steps", "1", "--temperature", "0.7")


def test_the_teacher_in_the_groups_is_followed(command, small_folder):
    folder = command("--training-steps", "4", "--lr", "1e-2", "--distill-enabled",
                     "--distill-coef", "5", "--distill-temperature", "0.5", teacher=200)
    rows = read_jsonl(folder / "metrics.jsonl")
    assert rows[-1]["loss/distill"] < rows[0]["loss/distill"]
    final, start = (AutoModelForCausalLM.from_pretrained(path) for path in
                    (folder / "final_model", small_folder))
    assert chance_of(final, range(200, 201)) > 1.5 * chance_of(start, range(200, 201))


def test_distillation_without_a_teacher_in_the_groups_is_an_error(command):
    with pytest.raises(SystemExit, match="first 8 batches brings distill_token_ids"):
        command("--training-steps", "9", "--distill-enabled")


@pytest.fixture
def alone(small_folder, tmp_path):
    """The configuration of a run whose API is not there."""
    return to_config(atropos.parser().parse_intermixed_args([
        "--model", str(small_folder), "--weight-bridge-mode", "bridge", "--vllm-port",
        str(free_port()), "--atropos-url", f"http://127.0.0.1:{free_port()}", "--save-path",
        str(tmp_path / "run"), "--group-timeout", "0.3", "--max-model-len", "48",
        "inference_model.backend=transformers"]))


def test_without_an_api_the_run_waits_and_says_for_what(alone):
    with atropos_trainer(alone) as trainer, pytest.raises(
            TimeoutError, match="the Atropos API did not answer"):
        trainer.fit()


def registered_and_silent(url: str, ended: threading.Event) -> None:
    """Registers as atroposlib does, and then asks somebody else."""
    client = AtroposClient(url)
    while not ended.wait(0.05):
        if client.register_env(env_registration(desired_name="silent"))["status"] == "success":
            return


def test_environments_that_register_and_ask_nobody_are_told_of(command, monkeypatch, tmp_path):
    monkeypatch.setitem(SilenceCheck.__init__.__kwdefaults__, "after", 0.2)
    ended, port = threading.Event(), free_port()
    with HubServer() as hub:
        thread = threading.Thread(target=registered_and_silent, args=(hub.url, ended))
        thread.start()
        try:
            with pytest.raises(SystemExit, match=r"silent_0 registered 0.2 s ago(.|\n)*"
                                                 "--forward-ports 9004,9005,9006,9007"):
                command("--atropos-url", hub.url, "--group-timeout", "3", "--training-steps", "1",
                        "--vllm-port", str(port))
        finally:
            ended.set()
            thread.join()


def test_environments_that_ask_other_ports_are_led_to_the_policy(command):
    ports = free_ports(2)
    command("--training-steps", "1", "--forward-ports", ",".join(map(str, ports)),
            asked=ports[1])
    with socket.create_server(("127.0.0.1", ports[0])):
        pass  # it has ended with the run


def test_a_port_that_is_taken_is_named_before_anything_is_started(command, monkeypatch):
    monkeypatch.setattr("grpo.run.build_atropos.build_actor", lambda *_: pytest.fail("too late"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SystemExit, match=rf"\(--forward-ports\)=\[{port}\]: port {port} .*"
                                             "Address already in use; end what listens there"):
            command("--training-steps", "1", "--forward-ports", str(port))


@pytest.mark.parametrize(("ports", "said"), [
    ("9001", "port 9001 is that of the engine itself"),
    ("70000", "has 70000, which is no port"), ("9004,9004", "port 9004 is named twice")])
def test_ports_that_cannot_be_forwarded_are_refused_at_once(ports, said):
    with pytest.raises(ConfigError, match=said):
        to_config(atropos.parser().parse_intermixed_args(
            ["--model", "m", "--forward-ports", ports]))


def test_a_run_without_groups_quotes_its_environments(alone):
    quiet, loud = (SimpleNamespace(troubles=lambda text=text: text) for text in ("", "no key"))
    assert troubles_of([quiet]) == ""
    with atropos_trainer(alone, explain=lambda: troubles_of([quiet, loud])) as trainer:
        with pytest.raises(TimeoutError, match="API did not answer(.|\n)*\nno key$"):
            trainer.fit()


def test_what_the_run_depends_on_is_looked_after(alone):
    def gone() -> None:
        raise RuntimeError("the environment is given up")

    with atropos_trainer(alone, checks=[gone]) as trainer, pytest.raises(
            RuntimeError, match="is given up"):
        trainer.fit()


@pytest.mark.parametrize(("argv", "parts"), [
    (["--env-flag", "group_size", "--env", "a.py"], "--env-flag group_size is not NAME=VALUE"),
    (["--env", "a.py"], "--env a.py: there is no such file"),
    (["--env-flag", "env.group_size=8"], "--env-flag is not read without --env"),
    (["--env-flag", "env.rollout_server_url=http://other:8000", "--env", "a.py"],
     "--env-flag has env.rollout_server_url=http://other:8000, but the run takes groups from "
     "--atropos-url"),
    (["--atropos-url", "http://192.0.2.1:8000"], "one can be started on this machine only"),
])
def test_what_the_run_command_cannot_start_is_refused(argv, parts, monkeypatch):
    monkeypatch.setattr(AtroposClient, "alive", lambda self: False)
    with pytest.raises(SystemExit) as error:
        launch.main(["--model", "m", *argv])
    assert parts in str(error.value)


@pytest.fixture
def start_hub(tmp_path):
    """Start the run's hub at an address, unless one can be used there; returns its checks."""
    with ExitStack() as started:
        def start(url: str) -> list:
            args = launch.parser().parse_intermixed_args(
                ["--model", "m", "--atropos-url", url, "--log-dir", str(tmp_path)])
            checks = []
            beside.start_hub(to_config(args), started, checks, named=f"--atropos-url {url}")
            return checks

        yield start


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "[::1]"])
def test_a_hub_is_started_at_the_loopback_address_that_was_asked_for(host, start_hub):
    family = socket.AF_INET6 if "[" in host else socket.AF_INET
    try:
        with socket.socket(family) as sock:
            sock.bind((host.strip("[]"), 0))
            port = sock.getsockname()[1]
    except OSError:
        pytest.skip(f"this machine has no {host}")
    assert len(start_hub(f"http://{host}:{port}")) == 1
    assert AtroposClient(f"http://{host}:{port}").alive()


def test_the_hub_of_another_run_is_left_alone(start_hub):
    url = f"http://127.0.0.1:{free_port()}"
    start_hub(url)
    assert AtroposClient(url).status()["hub"]["private"] is True
    with pytest.raises(ConfigError, match=f"--atropos-url {url} belongs to another run .*"
                                          "another port"):
        start_hub(url)


def test_a_hub_that_is_no_runs_own_is_used(start_hub, capsys):
    with HubServer() as hub:
        start_hub(hub.url)
    assert f"an API answers at {hub.url}; it is used" in capsys.readouterr().out


@pytest.mark.parametrize(("argv", "asked"), [
    ([], "http://127.0.0.1:9007/v1"),
    (["--weight-bridge-mode", "bridge"], "http://127.0.0.1:9007/v1"),
    (["inference_model.url=http://127.0.0.1:9123"], "http://127.0.0.1:9123/v1")])
def test_environments_ask_the_engine_that_the_run_uses(argv, asked, tmp_path, monkeypatch):
    monkeypatch.setattr(beside, "EnvironmentProcess", lambda script, **options: options["flags"])
    config = to_config(launch.parser().parse_intermixed_args(
        ["--model", "m", "--vllm-port", "9007", *argv]))
    flags = beside.environment(tmp_path / "env.py", tmp_path / "python", config, tmp_path, {})
    assert flags["openai.base_url"] == asked
