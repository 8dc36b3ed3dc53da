"""Several hosts on one machine: network namespaces with addresses, ports, loopback, shared memory
and folders of their own."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..support import environment

_NETWORK = "10.77.0"
# In the mount namespace of a host: what Ray keeps on a disk and in memory, a home, a name.
_ENTER = """
mkdir -p /tmp/ray {own}/ray {own}/home {shared}
mount --bind {own}/ray /tmp/ray && mount --bind {shared} /dev/shm && hostname {name}
cd {own}/home && export HOME=$PWD && exec {command}
"""


def available() -> bool:
    """Whether this machine lets us make hosts."""
    return os.geteuid() == 0 and shutil.which("ip") is not None and subprocess.run(
        ["unshare", "--net", "--mount", "--uts", "true"], capture_output=True).returncode == 0


class Hosts:
    """Hosts by number, from 1, on one bridge.

    Args:
        folder: for what they keep.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.prefix = folder, f"g{os.getpid() % 100_000}"
        self._numbers: list[int] = []
        self._ip("link", "add", self.prefix, "type", "bridge")
        self._ip("link", "set", self.prefix, "up")

    def add(self, number: int) -> None:
        """A host with the network and nothing that runs on it."""
        name, cable = self.name(number), f"{self.prefix}v{number}"
        self._ip("netns", "add", name)
        self._numbers.append(number)
        self._ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", name)
        self._ip("link", "set", cable, "master", self.prefix, "up")
        self._ip("-n", name, "addr", "add", f"{self.address(number)}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            self._ip("-n", name, "link", "set", device, "up")

    def name(self, number: int) -> str:
        return f"{self.prefix}h{number}"

    def address(self, number: int) -> str:
        return f"{_NETWORK}.{number}"

    def home(self, number: int) -> Path:
        """The working directory of its commands."""
        return self.folder / str(number) / "home"

    def log(self, number: int) -> Path:
        """What the last command on a host has printed."""
        return self.folder / f"{number}.log"

    def start(self, number: int, *command: str) -> subprocess.Popen:
        """A command on a host, which prints to its log."""
        inside = _ENTER.format(own=self.folder / str(number), name=self.name(number),
                               shared=f"/dev/shm/{self.name(number)}", command=shlex.join(command))
        with self.log(number).open("w") as log:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.name(number), "unshare", "--mount", "--uts",
                 "bash", "-c", inside], env=environment(OMP_NUM_THREADS="1"), stdout=log,
                stderr=subprocess.STDOUT)

    def run(self, number: int, *command: str, timeout: float = 120.0) -> None:
        """A command that succeeds."""
        ended = self.start(number, *command).wait(timeout)
        assert ended == 0, self.log(number).read_text()[-3000:]

    def start_ray(self, number: int, *, head: bool = False) -> None:
        """Ray with room for one actor; on the ``head``, which all others need, or beside it."""
        where = ["--head", "--port=6379", "--include-dashboard=false"] if head else [
            f"--address={self.address(1)}:6379"]
        self.run(number, str(Path(sys.executable).with_name("ray")), "start", *where,
                 f"--node-ip-address={self.address(number)}", "--num-cpus=1",
                 "--object-store-memory=150000000", "--disable-usage-stats")

    def cut_off(self, number: int) -> None:
        """Its cable is pulled; what runs on it runs on, and nobody is told."""
        self._ip("-n", self.name(number), "link", "set", "eth0", "down")

    def close(self) -> None:
        """End what runs on the hosts, and remove them."""
        for number in self._numbers:
            found = subprocess.run(["ip", "netns", "pids", self.name(number)], text=True,
                                   capture_output=True, check=True).stdout.split()
            subprocess.run(["kill", "-9", *found]) if found else None
            self._ip("netns", "del", self.name(number))
            shutil.rmtree(f"/dev/shm/{self.name(number)}", ignore_errors=True)
        self._ip("link", "del", self.prefix)

    @staticmethod
    def _ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@contextmanager
def hosts(folder: Path, count: int) -> Iterator[Hosts]:
    """Hosts 1 to ``count``, and their end."""
    found = Hosts(folder)
    try:
        for number in range(1, count + 1):
            found.add(number)
        yield found
    finally:
        found.close()


def rows_of(run: Path) -> list[dict]:
    """Metrics that a run has written so far."""
    files = list(run.rglob("metrics.jsonl"))
    return [json.loads(line) for line in files[0].read_text().splitlines()] if files else []
