"""Does the memory of any process of a long run grow? ``grpo-async.py`` and ``atropos-grpo-run``.

    python benchmarks/soak.py --minutes 30 --atropos-python .venv-atropos/bin/python \\
        --out benchmarks/results/soak_cpu.json

The two are started as users start them, on the CPU, side by side: ``grpo-async.py`` with Ray and a
worker with its own engine; hub, vLLM server, the arithmetic environment and ``atropos-grpo`` as
``atropos-grpo-run`` starts them. Both train the embedded model with a learning rate so small that
nothing they do changes with time. Every few seconds the memory of all their processes is read; a
line is fitted to what came after the first minutes. A process whose line rises by ``--bound`` MiB a
minute or more is named, and the exit code is 1.

Memory is what a process made itself (anonymous and shared memory, this divided among those who have
it), as ``/proc/PID/smaps_rollup`` says. The pages of libraries, which all processes of the machine
have in common and the kernel drops when it likes, do not count.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from machine import REPO, Recording

from grpo.system.lifeline import bind  # isort: skip
from grpo.system.child_process import Child, log_tail  # isort: skip

FOREVER = "1000000000"
START_TIMEOUT = 600.0  # seconds until the first step
STOP_TIMEOUT = 60.0  # seconds from SIGTERM to the end
_FIELDS = ("Pss_Anon:", "Pss_Shmem:", "SwapPss:")


def async_command(folder: Path, _args: argparse.Namespace) -> list[str]:
    return [sys.executable, str(REPO / "sota-implementations/grpo/grpo-async.py"),
            f"hydra.run.dir={folder}", "device=cpu", f"train.total_dialog_turns={FOREVER}",
            "env.num_envs=8", "optimizer.lr=1e-9"]


def atropos_command(folder: Path, args: argparse.Namespace) -> list[str]:
    with bind("127.0.0.1", 0) as hub, bind("127.0.0.1", 0) as engine:
        hub_port, engine_port = hub.getsockname()[1], engine.getsockname()[1]
    return [sys.executable, "-m", "grpo.run.cli.launch", "--model-name", "embedded", "--env",
            str(REPO / "examples/atropos/arithmetic_env.py"), "--env-python",
            str(args.atropos_python), "--atropos-url", f"http://127.0.0.1:{hub_port}",
            "--vllm-port", str(engine_port), "--training-steps", FOREVER, "--batch-size", "8",
            "--gradient-accumulation-steps", "8", "--learning-rate", "1e-9", "--max-model-len",
            "64", "--checkpoint-interval", "100", "--eval-task", "arithmetic",
            "--eval-max-tokens", "4", "--save-path", str(folder), "--log-dir",
            str(folder / "logs")]


RUNS: dict[str, Callable[[Path, argparse.Namespace], list[str]]] = {
    "async": async_command, "atropos": atropos_command}


# -- processes ------------------------------------------------------------------------------------


def own_mib(pid: int) -> float | None:
    """Memory that a process made itself, in MiB; None if it is gone."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    found = [int(line.split()[1]) for line in text.splitlines() if line.startswith(_FIELDS)]
    return sum(found) / 1024 if found else None  # a zombie has none


def parents() -> dict[int, tuple[int, int]]:
    """Parent and start time of each process of the machine, by its id."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                # The command name, in parentheses, may itself contain spaces and parentheses.
                rest = (folder / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            found[int(folder.name)] = int(rest[1]), int(rest[19])
    return found


def name_of(pid: int) -> str:
    """What a process is, in few words."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    if not words:
        return ""
    if words[0].startswith(("ray::", "VLLM::")):
        return words[0].partition(".")[0]
    if "-m" in words[1:4]:
        return words[words.index("-m") + 1]
    named = next((Path(word).name for word in words[1:3] if word.endswith(".py")), None)
    return named or " ".join([Path(words[0]).name, *(
        word for word in words[1:3] if not word.startswith("--"))])


@dataclass
class Watched:
    """One process and what was seen of it: (seconds since the first step, MiB)."""

    name: str
    seen: list[tuple[float, float]] = field(default_factory=list)

    def slope(self, *, after: float) -> float | None:
        """MiB a minute from a line through what was seen after so many seconds; None if that is
        less than half of the time."""
        late = [pair for pair in self.seen if pair[0] >= after]
        if len(late) < 3:
            return None
        return 60 * statistics.linear_regression(*zip(*late, strict=True)).slope


class Family:
    """A process and all that came from it, also where its parent is gone."""

    def __init__(self, pid: int) -> None:
        self.known: dict[tuple[int, int], Watched] = {(pid, parents()[pid][1]): Watched("")}

    def look(self, now: float) -> None:
        """Find new processes, and read the memory of all."""
        table = parents()
        alive = {pid for pid, start in self.known if table.get(pid, (0, 0))[1] == start}
        fresh = alive
        while fresh:
            fresh = {pid for pid, (parent, _) in table.items() if parent in fresh} - alive
            alive |= fresh
        for pid in alive:
            mib, name = own_mib(pid), name_of(pid)
            if mib is not None and pid in table:
                watched = self.known.setdefault((pid, table[pid][1]), Watched(name))
                watched.name = name or watched.name
                watched.seen.append((now, mib))



# -- runs -----------------------------------------------------------------------------------------


class Soak:
    """A run that is watched.

    Args:
        name: one of ``RUNS``.
        folder: of the run.
        args: of the command line.
    """

    def __init__(self, name: str, folder: Path, args: argparse.Namespace) -> None:
        self.name, self.folder, self.args = name, folder, args
        self.command = RUNS[name](folder, args)
        self.child = Child(
            self.command, log_path=folder.with_suffix(".log"), cwd=folder.parent,
            env={"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)})
        self.family = Family(self.child.pid)
        self.began: float | None = None  # time of the first step
        self.started = time.monotonic()
        self.ending: str | None = None
        self._steps = 0

    def steps(self) -> int:
        """Steps that were trained; as they were last counted, when the folder is gone."""
        try:
            with (self.folder / "metrics.jsonl").open("rb") as file:
                self._steps = sum(b'"time/step"' in line for line in file)
        except FileNotFoundError:
            pass
        return self._steps

    def look(self) -> bool:
        """Read the memory; whether the time is not up yet.

        Raises:
            RuntimeError: if the run ended by itself, or does not get to its first step.
        """
        if not self.child.alive():
            raise RuntimeError(f"{self.name} ended with {self.child.ending()}"
                               f"{log_tail(self.child.log_path)}")
        now = time.monotonic()
        if self.began is None:
            if now - self.started > START_TIMEOUT:
                raise RuntimeError(f"{self.name}: no step within {START_TIMEOUT:g} s"
                                   f"{log_tail(self.child.log_path)}")
            if self.steps():
                self.began = now
            return True
        self.family.look(now - self.began)
        return now - self.began < 60 * self.args.minutes

    def stop(self) -> None:
        """End it as a user does, and see that it ends."""
        self.child.stop(timeout=STOP_TIMEOUT)
        self.ending = self.child.ending()

    def result(self) -> dict:
        """Slope and minutes of each process that lived long enough for a line."""
        settle = 60 * self.args.settle
        processes, short, used = {}, Counter(), Counter()
        for watched in self.family.known.values():
            if not watched.seen:
                continue
            lived = watched.seen[-1][0] - max(settle, watched.seen[0][0])
            slope = watched.slope(after=settle)
            if slope is None or lived < (60 * self.args.minutes - settle) / 2:
                short[watched.name] += 1
                continue
            used[watched.name] += 1
            number = f" ({used[watched.name]})" if used[watched.name] > 1 else ""
            processes[watched.name + number] = {
                "mib_per_minute": round(slope, 3), "mib_each_minute": by_minute(watched.seen)}
        command = " ".join(self.command[1:]).replace(f"{REPO}/", "")
        return {"command": command.replace(str(self.folder), "RUN"), "steps": self.steps(),
                "ending": self.ending, "processes": processes, "lived_shorter": dict(short)}


def by_minute(seen: list[tuple[float, float]]) -> list[float]:
    """Mean of each minute."""
    minutes: dict[int, list[float]] = {}
    for at, mib in seen:
        minutes.setdefault(int(at // 60), []).append(mib)
    return [round(statistics.mean(values), 2) for values in minutes.values()]


def growing(runs: dict[str, dict], bound: float) -> list[str]:
    """Processes whose line rises by the bound or more."""
    return [f"{run}: {name}" for run, found in runs.items()
            for name, process in found["processes"].items() if process["mib_per_minute"] >= bound]


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--minutes", type=float, default=30.0, help="from the first step on")
    parser.add_argument("--settle", type=float, default=5.0, help="minutes before the line begins")
    parser.add_argument("--interval", type=float, default=5.0, help="seconds between two looks")
    parser.add_argument("--bound", type=float, default=1.0, help="MiB a minute")
    parser.add_argument("--atropos-python", type=Path, default=REPO / ".venv-atropos/bin/python",
                        help="interpreter of the environment")
    parser.add_argument("--work", type=Path, help="folder in which runs and logs are kept")
    parser.add_argument("--out", type=Path)
    return parser


def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    recording = Recording("soak", args.out, bound_mib_per_minute=args.bound, minutes=args.minutes,
                          settle_minutes=args.settle)
    with ExitStack() as at_end:
        work = args.work or Path(at_end.enter_context(tempfile.TemporaryDirectory()))
        work.mkdir(parents=True, exist_ok=True)
        recording.describe_machine(also=("ray", "vllm"))
        soaks: list[Soak] = []
        for name in args.runs:  # one after the other has begun: to start takes all cores
            soaks.append(Soak(name, work.absolute() / name, args))
            at_end.callback(soaks[-1].stop)
            while soaks[-1].began is None:
                watch(soaks, recording)
                time.sleep(args.interval)
        while watch(soaks, recording):
            time.sleep(args.interval)
    runs = {soak.name: soak.result() for soak in soaks}
    recording.finish(runs=runs, growing=growing(runs, args.bound))
    sys.exit(1 if growing(runs, args.bound) else 0)


def watch(soaks: list[Soak], recording: Recording) -> bool:
    """Look at all runs, stop those whose time is up, and write what there is; whether one goes on.
    """
    for soak in soaks:
        if soak.ending is None and not soak.look():
            soak.stop()
    recording.add(runs={soak.name: soak.result() for soak in soaks})
    return any(soak.ending is None for soak in soaks)


if __name__ == "__main__":
    main()
