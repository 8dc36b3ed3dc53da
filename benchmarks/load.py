"""64 environments, 10,000 groups, kills of hub, engine, trainer: is a group lost or used twice?

    python benchmarks/load.py --out benchmarks/results/load_cpu.json

The hub, its journal and an engine server with the embedded model are started as users start them.
Environments are light: threads of one process, each registered by itself, that pace themselves and
repeat what was not answered as atroposlib's do. A share of their groups (``--engine-share``) is
sampled by the engine, the rest they make up. One in fifty has a token that no model knows, one in
fifty is sent twice. The trainer is the library's client, stream, assembler, converter and
checkpoints, without a gradient: it writes down which groups a step would train on. With a fixed
seed the parts are killed (SIGKILL) when so many groups were trained, and started again; the trainer
goes on from its newest checkpoint.

Then what the hub's journal says is compared with what the environments sent and the trainer did.
Every group must have been acknowledged once, and trained on or left out and counted; none may be
twice in the steps that stay, those that are not undone by going on from a checkpoint. ``undone``
are groups that were trained on in no other.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from machine import REPO, Recording

from grpo.atropos.client import AtroposClient, AtroposError  # isort: skip
from grpo.atropos.schemas import EnvRegistration, Registration  # isort: skip
from grpo.system.lifeline import bind  # isort: skip
from grpo.policies.client import EngineClient  # isort: skip
from grpo.system.child_process import Child, log_tail  # isort: skip

ROWS = 4  # of a group
BATCH = 8 * ROWS
BASE = 200  # of a group's number, which is two tokens of its prompt
UNKNOWN = 5000  # a token of no model here
PROMPT, ANSWER = 5, [70, 71, 72]
LEASE = 10.0  # seconds
CHECKPOINT = 10  # steps
DEADLINE = 900.0  # seconds without another trained step


# -- the environments' process --------------------------------------------------------------------


def until_answered(call: Callable[[], Any]) -> Any:
    """Call until there is an answer, as environments do that outlive their API and their engine."""
    deadline = time.monotonic() + DEADLINE
    while True:
        try:
            return call()
        except (AtroposError, ConnectionError, TimeoutError, RuntimeError) as error:
            status = getattr(error, "status", None)
            if time.monotonic() > deadline or (status is not None and status < 500):
                raise
            time.sleep(0.1)


def kind_of(number: int, seed: int) -> tuple[bool, float]:
    """Whether a group is bad, and a number from 0 to 1 that decides the rest."""
    draw = random.Random(f"{seed}/{number}")
    return draw.random() < 0.02, draw.random()


def make_group(number: int, env: int, args: argparse.Namespace) -> dict:
    """A group whose number is in its prompt."""
    bad, draw = kind_of(number, args.seed)
    prompt = [PROMPT, number // BASE, number % BASE]
    answers, log_probs = [ANSWER] * ROWS, [[-1.0] * len(ANSWER)] * ROWS
    if draw < args.engine_share:
        engine = EngineClient(args.engine_url, timeout=60.0)
        found = until_answered(lambda: engine.generate([prompt], n=ROWS, max_tokens=4))[0]
        answers, log_probs = found.tokens, found.log_probs
    if bad:
        answers = [[UNKNOWN, *answer[1:]] for answer in answers]
    return {"tokens": [prompt + answer for answer in answers],
            "masks": [[-100] * len(prompt) + answer for answer in answers],
            "inference_logprobs": [[1.0] * len(prompt) + row for row in log_probs],
            "scores": [float(row % 2) for row in range(ROWS)], "env_id": env,
            "group_uid": str(number)}


def run_environment(index: int, args: argparse.Namespace, accepted: Any) -> None:
    client = AtroposClient(args.url, timeout=30.0)
    wish = EnvRegistration(max_token_length=64, desired_name=f"load{index}", weight=1.0,
                           group_size=ROWS)
    while "env_id" not in (answer := until_answered(lambda: client.register_env(wish))):
        time.sleep(0.5)  # no trainer has started
    env, number = answer["env_id"], index
    done = args.folder / "all settled"
    # Beyond the last number come groups that only let the last batches fill.
    while number < args.groups or not done.exists():
        while until_answered(lambda: client.status_env(env))["queue_size"] > 4 * BATCH // ROWS:
            time.sleep(0.05)
            if done.exists():
                return
        group = make_group(number, env, args)
        for _ in range(2 if kind_of(number, args.seed)[1] > 0.98 else 1):
            until_answered(lambda group=group: client.send(group))
        accepted.write(f"{number}\n")
        number += args.environments


def run_environments(args: argparse.Namespace) -> None:
    with (args.folder / "accepted").open("a", buffering=1) as accepted:
        threads = [threading.Thread(target=run_environment, args=(index, args, accepted))
                   for index in range(args.environments)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


# -- the trainer's process ------------------------------------------------------------------------


def run_trainer(args: argparse.Namespace) -> None:
    """Steps, each written down, with a checkpoint now and then, until SIGTERM."""
    from grpo import data
    from grpo.atropos.assemble import GroupAssembler, StreamSource
    from grpo.atropos.convert import GroupConverter
    from grpo.atropos.stream import BatchStream
    from grpo.envs.embedded import EmbeddedSpec, byte_tokenizer, small_qwen2
    from grpo.training.checkpoint import list_checkpoints, save_checkpoint

    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    tokenizer = byte_tokenizer()
    model = small_qwen2(EmbeddedSpec(hidden_size=8), len(tokenizer))
    saved = [found for found in list_checkpoints(args.folder) if found.damage() is None][-1:]
    step = saved[0].step if saved else 0
    stream = BatchStream(AtroposClient(args.url, timeout=30.0), Registration(
        wandb_group="", wandb_project="", batch_size=BATCH, max_token_len=64, checkpoint_dir="",
        save_checkpoint_interval=CHECKPOINT, starting_step=step, num_steps=10**6),
        poll_seconds=0.02, lease_seconds=LEASE, hold=True)
    assembler = GroupAssembler(StreamSource(stream), GroupConverter(
        pad_token_id=tokenizer.pad_token_id, vocab_size=len(tokenizer)), rows=BATCH)
    if saved:
        assembler.load_state_dict(saved[0].state()["env"])
    with stream, (args.folder / "trained.jsonl").open("a", buffering=1) as trained:
        trained.write(json.dumps({"begin": step}) + "\n")
        while not ended.is_set():
            if not assembler.poll(1.0):
                continue
            tokens = assembler.batch()[data.TOKENS][::ROWS]
            step += 1
            trained.write(json.dumps({"step": step, "groups": (
                tokens[:, 1] * BASE + tokens[:, 2]).tolist()}) + "\n")
            if step % CHECKPOINT == 0:
                state = {"step": step, "env": assembler.state_dict()}
                save_checkpoint(args.folder, step, model=model, tokenizer=tokenizer, state=state,
                                config={}, keep=2)
                assembler.saved()
    counts = {"metrics": assembler.metrics()}
    (args.folder / "counts.json").write_text(json.dumps(counts))


# -- the run --------------------------------------------------------------------------------------


class Site:
    """The parts, started again when they were killed."""

    def __init__(self, args: argparse.Namespace, stack: ExitStack) -> None:
        self.args, self.stack = args, stack
        with bind("127.0.0.1", 0) as hub, bind("127.0.0.1", 0) as engine:
            self.hub_port, self.engine_port = (sock.getsockname()[1] for sock in (hub, engine))
        own = [str(REPO / "benchmarks/load.py"), "--url", f"http://127.0.0.1:{self.hub_port}",
               "--engine-url", f"http://127.0.0.1:{self.engine_port}", "--folder",
               str(args.folder), "--groups", str(args.groups), "--environments",
               str(args.environments), "--seed", str(args.seed), "--engine-share",
               str(args.engine_share)]
        self.commands = {
            "hub": ["-m", "grpo.atropos.hub_server", "--port", str(self.hub_port), "--journal",
                    str(args.folder / "journal")],
            "trainer": [*own, "--part", "trainer"],
            "environments": [*own, "--part", "environments"]}
        if args.engine_share > 0:
            from grpo.envs.embedded import EmbeddedSpec, embedded_model
            from grpo.envs.tasks import make_task
            from grpo.server.engine_process import server_command

            model = str(embedded_model(make_task("arithmetic"), EmbeddedSpec()))
            self.commands["engine"] = server_command(
                model, dtype="float32", max_model_len=64, port=self.engine_port)[1:]
        self.children: dict[str, Child] = {}

    def start(self, part: str) -> None:
        child = Child([sys.executable, *self.commands[part]],
                      log_path=self.args.folder / f"{part}.log",
                      env={"PYTHONPATH": str(REPO), "HF_HUB_OFFLINE": "1"})
        self.children[part] = child
        self.stack.callback(child.stop)

    def kill(self, part: str) -> None:
        """SIGKILL, and another one."""
        os.kill(self.children[part].pid, signal.SIGKILL)
        self.children[part].stop()
        self.start(part)

    def check(self) -> None:
        for part, child in self.children.items():
            if not child.alive():
                raise RuntimeError(f"{part} ended with {child.ending()}{log_tail(child.log_path)}")


def schedule(args: argparse.Namespace) -> list[tuple[int, str]]:
    """When which part is killed, in trained groups."""
    draw = random.Random(args.seed)
    parts = [part for part, count in args.kills.items() for _ in range(count)]
    return sorted((int(args.groups * draw.uniform(0.03, 0.95)), part) for part in parts)


def steps_of(folder: Path) -> tuple[dict[int, list[int]], Counter[int]]:
    """Groups of the steps that stay, and how often each was in any step."""
    kept: dict[int, list[int]] = {}
    ever: Counter[int] = Counter()
    path = folder / "trained.jsonl"
    for line in path.read_text().splitlines() if path.exists() else ():
        row = json.loads(line)
        if "begin" in row:
            kept = {step: groups for step, groups in kept.items() if step <= row["begin"]}
        else:
            kept[row["step"]] = row["groups"]
            ever.update(row["groups"])
    return kept, ever


def acknowledged(journal: Path) -> Counter[int]:
    """How often the hub took each group for used."""
    from grpo.atropos.hub_journal import Journal
    from grpo.atropos.hub_state import HubState

    copy = journal.with_name("copy of the journal")
    shutil.copyfile(journal, copy)
    found: Counter[int] = Counter()
    state, records = HubState(), Journal(copy)
    for note, body in records.replay():
        if note["kind"] == "acknowledge":
            leases = state.leases | {lease.id: lease for lease in state.returned}
            unused = note.get("unused", ())
            found.update(int(json.loads(group.body)["group_uid"])
                         for place, group in enumerate(leases[note["id"]].groups)
                         if place not in unused)
        state.apply(note, body, 0.0)
    records.close()
    return found


def compare(args: argparse.Namespace) -> dict:
    """What became of the groups, by the three who know."""
    numbers = range(args.groups)
    bad = {number for number in numbers if kind_of(number, args.seed)[0]}
    said = acknowledged(args.folder / "journal")
    steps, ever = steps_of(args.folder)
    kept = Counter(number for groups in steps.values() for number in groups)
    sent = set(map(int, (args.folder / "accepted").read_text().split()))
    return {
        "accepted": sum(number in sent for number in numbers),
        "acknowledged": sum(said[number] > 0 for number in numbers),
        "acknowledged_twice": sum(count > 1 for count in said.values()),
        "trained": sum(ever[number] > 0 for number in numbers),
        "left_out": sum(said[number] > 0 and number in bad for number in numbers),
        "trained_though_bad": sum(ever[number] > 0 for number in bad),
        "lost": sum(not ever[number] and number not in bad for number in numbers),
        "trained_twice": sum(count > 1 for count in kept.values()),
        "undone": sum(ever[number] > 0 and not kept[number] for number in numbers),
        "in_steps_that_stay": sum(kept[number] > 0 for number in numbers)}


def follow(site: Site, args: argparse.Namespace, recording: Recording) -> None:
    """Kill by the schedule, until every group was settled."""
    waiting, done = schedule(args), []
    moved, last = time.monotonic(), -1
    while True:
        site.check()
        _, ever = steps_of(args.folder)
        count = sum(number < args.groups for number in ever)
        if count != last:
            moved, last = time.monotonic(), count
        if time.monotonic() - moved > DEADLINE:
            raise RuntimeError(f"{count} groups were trained on, and for {DEADLINE:g} s none came"
                               f"{log_tail(args.folder / 'trainer.log')}")
        while waiting and count >= waiting[0][0]:
            at, part = waiting.pop(0)
            site.kill(part)
            done.append({"at": at, "part": part})
            recording.add(kills=done, so_far=count)
        if not waiting and settled(args):
            return
        time.sleep(0.5)


def settled(args: argparse.Namespace) -> bool:
    said = acknowledged(args.folder / "journal")
    return all(said[number] for number in range(args.groups))


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--environments", type=int, default=64)
    add("--groups", type=int, default=10_000, help=f"less than {BASE**2}")
    add("--kills", nargs=3, type=int, default=(5, 2, 5), metavar=("HUB", "ENGINE", "TRAINER"))
    add("--engine-share", type=float, default=0.02, help="of the groups; 0: there is no engine")
    add("--seed", type=int, default=0)
    add("--folder", type=Path, help="in which logs, journal and checkpoints are kept")
    add("--out", type=Path)
    for name in ("--part", "--url", "--engine-url"):  # of the processes that this one starts
        add(name, help=argparse.SUPPRESS)
    return parser


def main(argv: list[str] | None = None) -> dict:
    args = parser().parse_args(argv)
    if args.part:
        return {"trainer": run_trainer, "environments": run_environments}[args.part](args) or {}
    args.kills = dict(zip(("hub", "engine", "trainer"), args.kills, strict=True))
    if not args.engine_share:
        args.kills["engine"] = 0
    recording = Recording("load", args.out, groups=args.groups, environments=args.environments,
                          engine_share=args.engine_share, seed=args.seed)
    recording.describe_machine(also=("vllm",))
    with ExitStack() as stack:
        if args.folder is None:
            args.folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        args.folder = args.folder.absolute()
        args.folder.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        site = Site(args, stack)
        for part in site.commands:
            site.start(part)
        follow(site, args, recording)
        seconds = time.monotonic() - began
        (args.folder / "all settled").touch()
        for part in ("trainer", "environments", "hub"):
            site.children[part].stop(timeout=60.0)
        found = compare(args)
        recording.finish(seconds=round(seconds, 1), found=found, counts=json.loads(
            (args.folder / "counts.json").read_text())["metrics"])
    return found


if __name__ == "__main__":
    main()
