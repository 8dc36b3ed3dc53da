"""Several hosts on one machine: network namespaces with addresses, ports, loopback, shared memory
and folders of their own."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
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
    """Hosts by number, on one bridge; leaving the context ends and removes them.

    Args:
        folder: for what they keep.
        numbers: of the hosts.
        **env: further variables of their processes.
    """

    def __init__(self, folder: Path, *numbers: int, **env: str) -> None:
        self.folder, self.prefix = folder, f"g{os.getpid() % 100_000}"
        # Compiled modules are kept, as on hosts that were used before: imports take longest.
        self.env = os.environ | {
            "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO),
            "PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(folder / "compiled")} | env
        self._started: list[subprocess.Popen] = []
        folder.mkdir(exist_ok=True)
        with ExitStack() as stack:
            stack.callback(shutil.rmtree, folder / "compiled", ignore_errors=True)
            _ip("link", "add", self.prefix, "type", "bridge")
            stack.callback(_ip, "link", "del", self.prefix)
            _ip("link", "set", self.prefix, "up")
            for number in numbers:
                stack.callback(self._remove, number)
                self._add(number)
            self._stack = stack.pop_all()

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()  # each part, also when another fails
        for process in self._started:
            process.wait(30)

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

    def entering(self, number: int, command: str) -> list[str]:
        """Arguments that run a line of bash on a host, from here or from another host."""
        inside = _ENTER.format(own=self.folder / str(number), name=self.name(number),
                               shared=f"/dev/shm/{self.name(number)}", command=command)
        return ["ip", "netns", "exec", self.name(number), "unshare", "--mount", "--uts", "bash",
                "-c", inside]

    def start(self, number: int, *command: str) -> subprocess.Popen:
        """A command on a host, which prints to its log."""
        with self.log(number).open("w") as log:
            process = subprocess.Popen(self.entering(number, shlex.join(command)), env=self.env,
                                       stdout=log, stderr=subprocess.STDOUT)
        self._started.append(process)
        return process

    def start_ray(self, *numbers: int, head: bool = False) -> None:
        """Ray with room for one actor, on the ``head``, which all others need, or beside it."""
        where = ["--head", "--port=6379", "--include-dashboard=false"] if head else [
            f"--address={self.address(1)}:6379"]
        ray = str(Path(sys.executable).with_name("ray"))
        starting = {number: self.start(
            number, ray, "start", *where, f"--node-ip-address={self.address(number)}",
            "--num-cpus=1", "--object-store-memory=150000000", "--disable-usage-stats")
            for number in numbers}
        for number, process in starting.items():
            if process.wait(120) != 0:
                raise RuntimeError(f"no Ray on host {number}: {self.log(number).read_text()}")

    def cut_off(self, number: int) -> float:
        """Its cable is pulled; what runs on it runs on, and nobody is told. Returns when."""
        _ip("-n", self.name(number), "link", "set", "eth0", "down")
        return time.time()

    def _cable(self, number: int) -> str:
        return f"{self.prefix}v{number}"

    def _add(self, number: int) -> None:
        name, cable = self.name(number), self._cable(number)
        _ip("netns", "add", name)
        _ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", name)
        _ip("link", "set", cable, "master", self.prefix, "up")
        _ip("-n", name, "addr", "add", f"{self.address(number)}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _ip("-n", name, "link", "set", device, "up")

    def _remove(self, number: int) -> None:
        name = self.name(number)
        found = subprocess.run(["ip", "netns", "pids", name], text=True, capture_output=True)
        if pids := found.stdout.split():
            subprocess.run(["kill", "-9", *pids], capture_output=True)
        # First, or the name would be free some time after the host is gone only.
        subprocess.run(["ip", "link", "del", self._cable(number)], capture_output=True)
        _ip("netns", "del", name)
        # Of this machine, which the host has had as its own.
        shutil.rmtree(f"/dev/shm/{name}", ignore_errors=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
