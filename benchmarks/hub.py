"""Our hub beside atroposlib's run-api: groups per second in and out, a long queue, memory.

    python benchmarks/hub.py --atropos-python .venv-atropos/bin/python \\
        --out benchmarks/results/hub_cpu.json

Both servers are started in turn, each as the command that users start, on this machine, and asked
by the same client. A group is 8 sequences of 256 tokens with masks, scores and log-probs, sent as
environments send it: packed by gzip, with a connection of its own for each request. Measured:

* in: requests a second while the queue grows from empty, senders concurrent, bodies prepared; and
  the server's processor time for each, which a busy machine does not change;
* memory: growth of the server's resident memory, divided by the groups in the queue;
* first batch: seconds for the first ``GET /batch`` with the whole queue waiting;
* out: groups a second over further batches, the slowest of them, and the server's processor time;
  the client reads the answer, neither packed nor decoded;
* a status question of an environment with the whole queue waiting.

The hub is measured with and without its journal. Servers take turns for a few rounds; a figure is
the median of its rounds.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import gzip
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from machine import REPO, Recording

from grpo.system.lifeline import bind  # isort: skip
from grpo.system.http_call import http_request  # isort: skip

ROWS, TOKENS, PROMPT = 8, 256, 64
TIMEOUT = 600.0


class Server:
    """A server's process and how to ask it."""

    def __init__(self, command: list[str]) -> None:
        with bind("127.0.0.1", 0) as sock:
            self.port = sock.getsockname()[1]
        self.process = subprocess.Popen([*command, "--host", "127.0.0.1", "--port", str(self.port)],
                                        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                        cwd=REPO)

    def ask(self, method: str, path: str, body: bytes | None = None) -> bytes:
        status, answer = http_request("127.0.0.1", self.port, method, path, body, timeout=TIMEOUT)
        if status != 200:
            raise RuntimeError(f"{method} {path}: {status} {answer[:200]!r}")
        return answer

    def wait(self) -> None:
        deadline = time.monotonic() + 60
        while True:
            try:
                self.ask("GET", "/info")
                return
            except ConnectionError:
                if time.monotonic() > deadline or self.process.poll() is not None:
                    raise
                time.sleep(0.1)

    def memory(self) -> int:
        """Resident bytes."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        (line,) = [line for line in status.splitlines() if line.startswith("VmRSS")]
        return int(line.split()[1]) << 10


    def processor_seconds(self) -> float:
        """Processor time used so far, by all its threads."""
        stat = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def running(command: list[str]) -> Iterator[Server]:
    server = Server(command)
    try:
        server.wait()
        yield server
    finally:
        server.process.terminate()
        try:
            server.process.wait(20)
        except subprocess.TimeoutExpired:
            server.process.kill()
            server.process.wait()


def make_bodies(count: int) -> list[bytes]:
    """Packed groups; all differ, as those of environments do."""
    draw = random.Random(0)

    def rows(make) -> list[list]:
        return [[make(position) for position in range(TOKENS)] for _ in range(ROWS)]

    base = {"tokens": rows(lambda _: draw.randrange(150_000)), "env_id": 0,
            "inference_logprobs": rows(lambda at: 1.0 if at < PROMPT else -draw.expovariate(1.0)),
            "generation_params": {"temperature": 1.0}, "overrides": None, "group_overrides": None}
    base["masks"] = [[-100] * PROMPT + row[PROMPT:] for row in base["tokens"]]
    bodies = []
    for _ in range(count):
        text = json.dumps({**base, "scores": [draw.random() for _ in range(ROWS)]})
        bodies.append(gzip.compress(text.encode()))
    return bodies


def measure(command: list[str], bodies: list[bytes], args: argparse.Namespace) -> dict:
    with running(command) as server:
        server.ask("POST", "/register", json.dumps({
            "wandb_group": "", "wandb_project": "", "batch_size": args.batch_groups * ROWS,
            "max_token_len": TOKENS, "checkpoint_dir": "", "save_checkpoint_interval": 0,
            "starting_step": 0, "num_steps": 1_000_000}).encode())
        server.ask("GET", "/batch")
        server.ask("POST", "/register-env", json.dumps({
            "max_token_length": TOKENS, "desired_name": "bench", "weight": 1.0,
            "group_size": ROWS}).encode())
        memory, busy = server.memory(), server.processor_seconds()
        into = send(server, bodies, args)
        memory = server.memory() - memory
        busy_in = server.processor_seconds() - busy
        status = timed(lambda: server.ask("GET", "/status-env", b'{"env_id": 0}'))
        first = timed(lambda: server.ask("GET", "/batch"))
        busy = server.processor_seconds()
        times = [timed(lambda: server.ask("GET", "/batch")) for _ in range(args.batches)]
        busy_out = server.processor_seconds() - busy
        last = server.ask("GET", "/batch")
        assert len(json.loads(last)["batch"]) == args.batch_groups
    out = args.batch_groups * args.batches
    return {"groups_per_second_in": into,
            "processor_ms_per_group_in": 1000 * busy_in / args.groups,
            "bytes_of_memory_per_group": memory / args.groups,
            "status_env_seconds_full_queue": status, "first_batch_seconds_full_queue": first,
            "groups_per_second_out": out / sum(times),
            "processor_ms_per_group_out": 1000 * busy_out / out,
            "batch_seconds_median": statistics.median(times), "batch_seconds_max": max(times)}


def send(server: Server, bodies: list[bytes], args: argparse.Namespace) -> float:
    """Groups a second; written to bare sockets, for a slow client would hide the server."""
    requests = [b"POST /scored_data HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
                b"Content-Type: application/json\r\nContent-Encoding: gzip\r\n"
                b"Content-Length: %d\r\n\r\n%b" % (len(body), body) for body in bodies]

    def one(index: int) -> None:
        with socket.create_connection(("127.0.0.1", server.port), TIMEOUT) as connection:
            connection.sendall(requests[index % len(requests)])
            answer = b""
            while piece := connection.recv(4096):
                answer += piece
        assert answer.startswith(b"HTTP/1.1 200") and b"received" in answer, answer

    with concurrent.futures.ThreadPoolExecutor(args.senders) as pool:
        started = time.perf_counter()
        for _ in pool.map(one, range(args.groups)):
            pass
        return args.groups / (time.perf_counter() - started)


def timed(action) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def compare(ours: dict, theirs: dict) -> dict:
    return {name: ours[name] / theirs[name] if "per_second" in name
            else theirs[name] / max(ours[name], 1e-9) for name in ours}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--atropos-python", required=True, help="a Python that has atroposlib")
    parser.add_argument("--groups", type=int, default=10_000, help="in the queue")
    parser.add_argument("--batch-groups", type=int, default=8, help="groups of a batch")
    parser.add_argument("--batches", type=int, default=200, help="taken out after the first")
    parser.add_argument("--senders", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3, help="each with every server")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.groups < (args.batches + 2) * args.batch_groups:
        parser.error(f"--groups {args.groups} are too few for --batches {args.batches} of "
                     f"--batch-groups {args.batch_groups}")
    bodies = make_bodies(500)
    version = subprocess.run(
        [args.atropos_python, "-c", "from importlib.metadata import version as of; "
         "print(of('atroposlib'), of('fastapi'), of('uvicorn'))"],
        capture_output=True, text=True, check=True).stdout.split()
    hub = [sys.executable, "-m", "grpo.atropos.hub_server"]
    recording = Recording(
        "hub", args.out,
        run_api_versions=dict(zip(("atroposlib", "fastapi", "uvicorn"), version, strict=True)),
        group={"sequences": ROWS, "tokens": TOKENS,
               "json_bytes": len(gzip.decompress(bodies[0])), "packed_bytes": len(bodies[0])},
        queued_groups=args.groups, groups_per_batch=args.batch_groups, rounds=args.rounds)
    recording.add(command=recording.result["command"].replace(args.atropos_python, "PYTHON"))
    recording.describe_machine(also=("fastapi", "uvicorn"))
    with tempfile.TemporaryDirectory() as folder:
        journal = Path(folder) / "journal"
        servers = {"hub": hub, "hub_with_journal": [*hub, "--journal", str(journal)],
                   "run_api": [args.atropos_python, "-m", "atroposlib.cli.run_api"]}
        rounds: dict[str, list[dict]] = {name: [] for name in servers}
        for _ in range(args.rounds):
            for name, command in servers.items():
                journal.unlink(missing_ok=True)
                rounds[name].append(measure(command, bodies, args))
                recording.add(**summary(rounds))
    recording.finish()


def summary(rounds: dict[str, list[dict]]) -> dict:
    """Medians over the rounds of the servers that have had one."""
    result = {name: {key: statistics.median(one[key] for one in measured) for key in measured[0]}
              for name, measured in rounds.items() if measured}
    result["groups_per_second_in_each_round"] = {
        name: [one["groups_per_second_in"] for one in measured]
        for name, measured in rounds.items()}
    if rounds["run_api"]:
        result["hub_times_better"] = compare(result["hub"], result["run_api"])
    return result


if __name__ == "__main__":
    main()
