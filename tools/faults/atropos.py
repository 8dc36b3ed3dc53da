"""What a run on Atropos environments has beside it: a hub with a journal, and an environment."""

from __future__ import annotations

import json
import shutil
import socket
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from faults.forks import Fork, command
from faults.plant import planted, score, strike

_GROUP = 8
_WAIT = 0.1  # seconds, where nobody answers


class Groups:
    """What has become of the groups that the hub has said it took.

    Args:
        place: folder of the cell.
    """

    def __init__(self, place: Path) -> None:
        self.place = place

    def count(self) -> dict[str, int]:
        """Look at the hub's journal.

        Returns:
            ``sent``: the hub answered that it has them; ``trained``: acknowledged by a trainer;
            ``waiting``: kept by the hub for the next one; ``lost``: neither; ``twice``:
            acknowledged more than once.
        """
        from grpo.atropos.hub_journal import Journal
        from grpo.atropos.hub_state import HubState

        copy = self.place / "copy of the journal"
        shutil.copyfile(self.place / "journal", copy)
        state, journal, trained = HubState(), Journal(copy), Counter()
        known: set[str] = set()
        for note, body in journal.replay():
            if note["kind"] == "acknowledge":
                leases = state.leases | {lease.id: lease for lease in state.returned}
                trained.update(_name(group) for group in leases[note["id"]].groups)
            state.apply(note, body, 0.0)
        journal.close()
        for lease in (*state.leases.values(), *state.returned):
            known.update(map(_name, lease.groups))
        known.update(map(_name, state.queue))
        sent = set((self.place / "sent").read_text().split())
        return {"sent": len(sent), "trained": len(trained), "waiting": len(known),
                "lost": len(sent - known - trained.keys()),
                "twice": sum(count > 1 for count in trained.values())}


def start_hub_and_environment(
    place: Path, env: Mapping[str, str], stack: ExitStack
) -> tuple[Groups, tuple[str, ...]]:
    """Both, until the stack ends; and the flags by which a trainer finds them."""
    from grpo.atropos.client import AtroposClient

    hub_port, engine_port = _free_port(), _free_port()
    url = f"http://127.0.0.1:{hub_port}"
    hub = Fork(command("grpo.atropos.hub_server"), log=place / "hub.log", cwd=place, env=env,
               argv=["hub_server", "--port", str(hub_port), "--journal", str(place / "journal")])
    stack.callback(hub.end)
    deadline = time.monotonic() + 60
    while not AtroposClient(url).alive():
        if time.monotonic() > deadline:
            raise RuntimeError(f"no hub within 60 s: {hub.log.read_text()[-2000:]}")
        time.sleep(_WAIT)
    environment = Fork(lambda: play(f"http://127.0.0.1:{engine_port}", url, place / "sent"),
                       log=place / "environment.log", cwd=place, env=env, argv=["environment"])
    stack.callback(environment.end)
    return Groups(place), ("--atropos-url", url, "--vllm-port", str(engine_port))


def play(engine: str, hub: str, sent: Path) -> None:
    """An environment without an end: ask the policy, score, send, until the hub has said yes."""
    from grpo.policies.client import EngineClient
    from grpo.policies.handle import EngineError

    policy, number = EngineClient(engine, timeout=60), 0
    with sent.open("a") as file:
        while True:
            prompt = [50 + number % 40, 60, 70]
            try:
                out = policy.call("POST", "/generate", {
                    "prompt": {"prompt_token_ids": prompt}, "n": _GROUP, "max_tokens": 4,
                    "logprobs": 0, "temperature": 1.0})
                body = _group(prompt, out, f"group-{number}")
            except (EngineError, OSError, ValueError, TypeError) as error:  # there is no trainer
                print(f"{type(error).__name__}: {error}", flush=True)
                time.sleep(_WAIT)
                continue
            if planted()[1] == "reward" and strike() and planted()[0] == "NaN":
                body["scores"][0] = float("nan")
            if _sent(hub, body):
                file.write(f"group-{number}\n")
                file.flush()
            number += 1


def _sent(hub: str, body: dict[str, Any]) -> bool:
    """Whether the hub took a group; it is told until it answers."""
    from grpo.system.http_call import http_request, split_url

    text = json.dumps(body).encode()  # which writes NaN, as most environments do
    while True:
        try:
            status, answer = http_request(*split_url(hub), "POST", "/scored_data", text, timeout=30)
        except OSError as error:
            print(f"{type(error).__name__}: {error}", flush=True)
            time.sleep(_WAIT)
            continue
        if status != 200:
            print(status, answer[:300], flush=True)
        if status == 200 or 400 <= status < 500:
            return status == 200


def _group(prompt: list[int], out: Mapping[str, Any], name: str) -> dict[str, Any]:
    rows = [[int(next(iter(position[0]))) for position in row] for row in out["logprobs"]]
    values = [[next(iter(position[0].values())) for position in row] for row in out["logprobs"]]
    return {"tokens": [prompt + row for row in rows],
            "masks": [[-100] * len(prompt) + row for row in rows],
            "inference_logprobs": [[1.0] * len(prompt) + row for row in values],
            "scores": [score("".join(map(chr, row))) for row in rows], "group_uid": name}


def _name(group: Any) -> str:
    return json.loads(group.body)["group_uid"]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]
