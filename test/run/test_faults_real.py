"""Hub, real vLLM server, unmodified environment and trainer as processes of their own: started in
any order, killed and started again, and sent what they cannot use."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from grpo.atropos.client import AtroposClient
from grpo.atropos.hub_journal import Journal
from grpo.atropos.hub_queue import QueuedGroup
from grpo.atropos.hub_state import HubState
from grpo.atropos.launcher import EnvironmentProcess, serve_flags
from grpo.policies.client import EngineClient
from grpo.report.loggers import read_jsonl
from grpo.server.engine_process import server_command
from grpo.system.child_process import Child, log_tail
from grpo.system.http_call import http_request
from grpo.system.lifeline import TOKEN_VARIABLE

from ..support import REPO, free_port, free_ports, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(480)]

TOKEN = "token-of-the-test"
GROUP = 8  # sequences, as the environment has them
BATCH = 2 * GROUP
ENDLESS = 10_000  # steps
LEASE = 150.0  # seconds in which what a killed process held is certainly handed out again
# Each part follows each other one directly, once.
ORDERS = [("hub", "engine", "trainer", "environment"), ("engine", "environment", "hub", "trainer"),
          ("environment", "trainer", "engine", "hub"), ("trainer", "hub", "environment", "engine")]
# A second trainer that needs no engine: the policy of its own process would answer.
ALONE = ["--weight-bridge-mode", "bridge", "inference_model.backend=transformers"]


class Site:
    """The four parts, each started by itself; all of them are ended with the stack."""

    def __init__(self, folder: Path, stack: ExitStack, *, model: str, python: Path,
                 token: str = "", steps: int) -> None:
        self.folder, self.stack, self.model, self.python = folder, stack, model, python
        self.token, self.steps = token, steps
        self.hub_port, self.engine_port = free_ports(2)
        self.url = f"http://127.0.0.1:{self.hub_port}"
        self.api = AtroposClient(self.url, token=token or None)
        self.engine_api = EngineClient(f"http://127.0.0.1:{self.engine_port}", token=token or None)
        self.journal = folder / "journal"
        (folder / "engine").mkdir()  # a trainer that comes first wants it, else it takes it as lost

    def start(self, part: str) -> None:
        {"hub": self.start_hub, "engine": self.start_engine, "trainer": self.start_trainer,
         "environment": self.start_environment}[part]()

    def start_hub(self) -> None:
        self.hub = self._child("hub", ["-m", "grpo.atropos.hub_server", "--port",
                                       str(self.hub_port), "--journal", str(self.journal)])

    def start_engine(self) -> None:
        command = server_command(
            self.model, served_model_name="tiny", dtype="float32", max_model_len=64,
            port=self.engine_port, shared_weights=True, log_dir=str(self.folder / "engine"))
        self.engine = self._child("engine", command[1:])

    def start_environment(self) -> None:
        flags = serve_flags(engine_url=self.engine_api.url, model="tiny", tokenizer=self.model,
                            token=self.token or None, group_size=GROUP)
        self.environment = self.stack.enter_context(EnvironmentProcess(
            REPO / "examples/atropos/arithmetic_env.py", python=self.python, api_url=self.url,
            api_token=self.token or None, flags=flags, name="additions",
            log_path=self.folder / "environment.log", env={"HF_HUB_OFFLINE": "1"}))

    def start_trainer(self, *argv: str) -> None:
        handover = ["--vllm-config-path", str(self.folder / "engine"),
                    "--log-dir", str(self.folder / "trainer" / "logs")]
        self.trainer = self.command("trainer", *handover, *argv, steps=self.steps,
                                    vllm_port=self.engine_port)

    def command(self, name: str, *argv: str, steps: int, vllm_port: int, **env: str) -> Child:
        """``atropos-grpo``, with its run in a folder of that name."""
        return self._child(name, [
            "-m", "grpo.run.cli.atropos", "--model-name", self.model, "--atropos-url",
            self.url, "--vllm-port", str(vllm_port), "--training-steps", str(steps), "--batch-size",
            str(GROUP), "--gradient-accumulation-steps", str(BATCH // GROUP), "--max-model-len",
            "64", "--checkpoint-interval", "2", "--group-timeout", "120", "--save-path",
            str(self.folder / name), *argv], **env)

    def _child(self, name: str, arguments: list[str], **env: str) -> Child:
        child = Child([sys.executable, *arguments], log_path=self.folder / f"{name}.log", env={
            "PYTHONPATH": str(REPO), "HF_HUB_OFFLINE": "1", TOKEN_VARIABLE: self.token,
            "COLUMNS": "200", **env})
        self.stack.callback(child.stop)
        return child

    def rows(self, name: str = "trainer") -> list[dict]:
        """Metrics of the steps of a run."""
        return read_jsonl(self.folder / name / "metrics.jsonl")

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def counts(self) -> dict:
        return self.api.status()["hub"]

    def wait_for(self, condition: Callable[[], object], *, timeout: float = 90.0) -> None:
        wait_until(condition, seconds=timeout, every=0.1, said=lambda: "".join(
            log_tail(path, 15) for path in sorted(self.folder.glob("*.log"))))

    def goes_on(self) -> None:
        """Wait for two more steps; at least the second has only groups from now on."""
        assert self.trainer.alive(), log_tail(self.trainer.log_path)
        reached = len(self.rows())
        self.wait_for(lambda: len(self.rows()) >= reached + 2)
        self.environment.check()

    def stop_within_an_update(self) -> None:
        """Leave trainer and engine as between the begin and the end of an update: the engine is
        paused, with requests of the environment in it, and the trainer does nothing more."""
        def stopped() -> bool:
            self.engine_api.pause("keep")
            os.kill(self.trainer.pid, signal.SIGSTOP)
            info = self.engine_api.info()
            if info["paused"] and info["open_requests"]:
                return True
            os.kill(self.trainer.pid, signal.SIGCONT)
            self.engine_api.resume()
            return False

        self.wait_for(stopped)

    def history(self) -> History:
        return History(self.journal)


class History:
    """What the hub has written down so far."""

    def __init__(self, path: Path) -> None:
        copy = path.with_name("copy of the journal")
        shutil.copyfile(path, copy)
        self.acknowledged: Counter[str] = Counter()  # how often each group was, by its name
        self.senders: set[int | None] = set()  # environments whose groups were acknowledged
        self.batches = 0  # that were acknowledged
        state, journal = HubState(), Journal(copy)
        for note, body in journal.replay():
            if note["kind"] == "acknowledge":
                leases = state.leases | {lease.id: lease for lease in state.returned}
                unused = note.get("unused", ())
                groups = [group for place, group in enumerate(leases[note["id"]].groups)
                          if place not in unused]
                self.batches += 1
                self.acknowledged.update(map(name_of, groups))
                self.senders.update(group.env for group in groups)
            state.apply(note, body, 0.0)
        journal.close()
        self.out = {name_of(group) for lease in state.leases.values() for group in lease.groups}

    def once(self) -> bool:
        """Whether no group was acknowledged more than once."""
        return max(self.acknowledged.values(), default=0) <= 1


def name_of(group: QueuedGroup) -> str:
    return json.loads(group.body)["group_uid"]


def group(**fields) -> dict:
    """A group for this model, whose rows are of one length and differ in their answers."""
    return {"tokens": [[50, 60, 70 + row] for row in range(GROUP)],
            "masks": [[-100, 60, 70 + row] for row in range(GROUP)],
            "scores": [float(row % 2) for row in range(GROUP)], **fields}


@pytest.fixture(scope="module")
def model(cache) -> str:
    from grpo.envs.embedded import EmbeddedSpec, embedded_model
    from grpo.envs.tasks import make_task

    pytest.importorskip("vllm")
    return str(embedded_model(make_task("arithmetic"), EmbeddedSpec(),
                              cache_dir=cache / "torchrl-grpo"))


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: f"{order[0]} first")
def test_any_of_the_four_may_come_first(order, tmp_path, model, python):
    with ExitStack() as stack:
        site = Site(tmp_path, stack, model=model, python=python, steps=3)
        for part in order:
            site.start(part)
            if part == "hub":
                site.wait_for(site.api.alive)
            elif part == "engine":
                site.wait_for(site.engine_api.alive, timeout=120)
            else:
                time.sleep(10)  # it has loaded what it needs, and waits for the others
        site.wait_for(lambda: not site.trainer.alive(), timeout=120)
        assert site.trainer.exit_code() == 0, log_tail(site.trainer.log_path)
        assert site.environment.restarts == 0
        assert [row["step"] for row in site.rows()] == [1, 2, 3]
        assert all(row["canary/max_abs_diff"] < 1e-4 for row in site.rows())
        assert site.rows()[0]["policy/log_prob_diff_abs_max"] < 1e-3
        assert (tmp_path / "trainer" / "final_model" / "model.safetensors").is_file()
        assert site.history().once()


@pytest.fixture(scope="module")
def running(tmp_path_factory, model, python) -> Iterator[Site]:
    """The four parts, training without an end; hub and engine want a token."""
    with ExitStack() as stack:
        site = Site(tmp_path_factory.mktemp("site"), stack, model=model, python=python,
                    token=TOKEN, steps=ENDLESS)
        for part in ORDERS[0]:
            site.start(part)
        site.wait_for(lambda: len(site.rows()) >= 2, timeout=150)
        yield site


@pytest.fixture
def site(running) -> Site:
    if not running.trainer.alive():
        running.start_trainer("--resume", "auto")
        running.goes_on()
    return running


def test_an_environment_killed_in_mid_group_comes_again(site):
    known = {env["env_id"] for env in site.counts()["environments"]}
    site.stop_within_an_update()
    os.kill(site.environment.pid, signal.SIGKILL)
    site.wait_for(lambda: site.environment.restarts == 1)
    site.engine_api.resume()
    os.kill(site.trainer.pid, signal.SIGCONT)
    site.wait_for(lambda: site.history().senders - known - {None})
    site.goes_on()
    assert not site.rows()[-1].get("reward/errors")


def test_a_killed_hub_has_kept_all_that_it_took(site):
    mine = [f"before the end {number}" for number in range(6)]
    site.api.send(*[group(group_uid=name) for name in mine])
    lost = site.api.batch(lease_seconds=15)  # by somebody who is never heard of again
    os.kill(site.hub.pid, signal.SIGKILL)
    site.hub.stop()
    out = site.history().out
    assert lost is not None and {one.group_uid for one in lost.groups} <= out
    time.sleep(3)  # the trainer uses what it has, and nobody hears it
    site.start_hub()
    site.goes_on()
    site.wait_for(lambda: out | set(mine) <= site.history().acknowledged.keys(), timeout=LEASE)
    assert site.history().once()
    assert not site.rows()[-1].get("atropos/groups_repeated")


def test_what_cannot_be_trained_on_is_refused_and_named(site):
    before = Counter(site.counts()["rejected"])
    wrong = {"bad_length": group(masks=[[-100]]), "empty_group": group(tokens=[]),
             "bad_type": group(tokens="none"), "not_finite": group(scores=[float("nan")] * GROUP)}
    for reason, obj in wrong.items():
        # As an environment sends it; the client's own JSON has no NaN.
        status, answer = http_request("127.0.0.1", site.hub_port, "POST", "/scored_data",
                                      json.dumps(obj).encode(), token=TOKEN, timeout=10)
        assert (status, json.loads(answer)["error"]["type"]) == (422, reason)
    counts = site.counts()
    assert Counter(counts["rejected"]) - before == dict.fromkeys(wrong, 1)
    assert "scores[0]=nan" in counts["last_rejected"]["not_finite"]
    # The hub does not look so closely; the trainer does.
    site.api.send(group(masks=[[-100, -100, -100]] * GROUP, group_uid="nothing to train on"))
    for _ in range(2):
        site.api.send(group(group_uid="sent twice"))
    assert site.counts()["duplicates"] == 1
    site.wait_for(lambda: site.rows()[-1].get("atropos/groups_rejected_nothing_trained") == 1)
    site.wait_for(lambda: "sent twice" in site.history().acknowledged)
    site.goes_on()
    assert site.history().once()


def test_a_wrong_token_ends_a_trainer_with_a_message(site):
    other = site.command("intruder", *ALONE, steps=2, vllm_port=free_port(),
                         **{TOKEN_VARIABLE: "another"})
    site.wait_for(lambda: not other.alive())
    assert other.exit_code() == 1
    (message,) = [line for line in site.log("intruder").splitlines() if line.startswith("error: ")]
    assert site.url in message and "token" in message and "401" in message
    assert "Traceback" not in site.log("intruder")
    site.goes_on()


def test_two_trainers_share_the_groups(site):
    used, reached = site.history().batches, len(site.rows())
    other = site.command("second", *ALONE, steps=4, vllm_port=free_port())
    site.wait_for(lambda: not other.alive(), timeout=120)
    assert other.exit_code() == 0, log_tail(other.log_path)
    assert [row["step"] for row in site.rows("second")] == [1, 2, 3, 4]
    steps = len(site.rows()) - reached
    history = site.history()
    # Each trained on batches of its own, and said so with a checkpoint; the first has yet to write
    # that of its last two steps.
    assert steps > 0 and history.once() and history.batches - used >= steps + 4 - 2
    for rows in (site.rows(), site.rows("second")):
        assert not rows[-1].get("atropos/groups_repeated")
    site.goes_on()


def test_a_trainer_killed_within_an_update_goes_on_from_its_checkpoint(site):
    site.stop_within_an_update()
    reached, unused = len(site.rows()), site.history().out
    os.kill(site.trainer.pid, signal.SIGKILL)
    site.trainer.stop()
    assert unused and site.engine_api.info()["paused"]
    site.start_trainer("--resume", "auto")
    site.wait_for(lambda: len(site.rows()) >= reached + 5)
    rows = site.rows()
    assert f"resumed at step {reached // 2 * 2} from" in site.log("trainer")
    assert [row["step"] for row in rows] == [*range(1, len(rows) + 1)]
    assert all(row["canary/max_abs_diff"] < 1e-4 for row in rows)
    site.wait_for(lambda: unused <= site.history().acknowledged.keys(), timeout=LEASE)
    assert site.history().once()
    site.goes_on()
