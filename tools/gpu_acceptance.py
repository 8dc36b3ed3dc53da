"""Run on this machine's GPUs what the pages promise of GPUs, and write what came of it.

    make gpu-acceptance
    python tools/gpu_acceptance.py --list          # what would run
    python tools/gpu_acceptance.py --only 'test/gpu/*' 'step time*'

Each command of README.md and docs/ on less work, the tests in test/gpu, and a step beside TRL's;
on two GPUs what needs two as well. Parts run side by side where memory allows, those that take
times alone. Each has a time limit, all of them a deadline, and the result, by default
benchmarks/results/acceptance_GPUS.json, is written anew whenever a part ends. The exit status is 0
if nothing failed and nothing that can run here was left out.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import re
import shlex
import signal
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO), str(REPO / "benchmarks"), str(REPO / "tools")]

from acceptance.family import Process, adopt_orphans, descendants, kill  # noqa: E402
from acceptance.pages import blocks  # noqa: E402
from acceptance.report import (  # noqa: E402
    Report,
    accepted,
    passed_before,
    read_earlier,
    table,
)
from acceptance.rows import PREPARE, all_parts, not_run  # noqa: E402
from acceptance.schedule import Part, Schedule, needed  # noqa: E402
from gpu_memory import gpu_memory, gpu_names  # noqa: E402
from step_time import make_problems  # noqa: E402

from grpo.system.processes import all_running  # noqa: E402

SHARE = 0.92  # of a GPU's memory that parts may take together


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--list", action="store_true", help="print what would run, and end")
    add("--only", nargs="+", metavar="PATTERN", help="parts with these names, and what they need")
    add("--skip", nargs="+", default=[], metavar="PATTERN", help="all parts but these")
    add("--continue", action="store_true", dest="go_on", help="do not run again what has "
        "passed with these sources, by the result's file: for what a slow host could not do in "
        "one call")
    add("--passed-in", nargs="+", type=Path, default=[], metavar="FILE", help="results on other "
        "GPUs of this kind: parts that passed there on as many GPUs, with these sources, are not "
        "run again, and the result names the file")
    add("--deadline", type=float, default=540.0, help="seconds for everything (540)")
    add("--jobs", type=int, default=max(1, (os.cpu_count() or 1) * 5 // 8),
        help="parts at a time (five for eight cores)")
    add("--gpus", type=int, help="use the first so many GPUs (all)")
    add("--work", type=Path, help="folder for models and logs, which then stays; it must be new")
    add("--out", type=Path, help="the result (benchmarks/results/acceptance_GPUS.json)")
    add("--commit", help="of a copy without its history; default: git's, or GRPO_COMMIT")
    return parser


def main() -> None:
    args = parser().parse_args()
    gpus = gpu_names()[:args.gpus]
    if args.commit:
        os.environ["GRPO_COMMIT"] = args.commit
    parts = choose(all_parts(len(gpus)), only=args.only, skip=args.skip)
    if args.list:
        print_plan(parts)
        return
    if not gpus:
        sys.exit("error: there is no GPU here; --list shows what would run on one")
    out = args.out or REPO / "benchmarks" / "results" / f"acceptance_{len(gpus)}.json"
    with tempfile.TemporaryDirectory() as temporary:
        work = (args.work or Path(temporary, "work")).absolute()
        sys.exit(run(parts, gpus, args, work, out))


def run(parts: list[Part], gpus: list[str], args: argparse.Namespace, work: Path, out: Path) -> int:
    """Run the parts; returns the exit status."""
    earlier = read_earlier(out, gpus=len(gpus)) if args.go_on else {}
    adopt_orphans()
    prepare_folder(work)
    report = Report(out, work, earlier=earlier, deadline_seconds=args.deadline,
                    command=shlex.join(["python", "tools/gpu_acceptance.py", *sys.argv[1:]]))
    schedule = Schedule(
        parts, gpus=gpus, gib=SHARE * min(gpu_memory(name).total for name in gpus) / 2**30,
        jobs=args.jobs, seconds=args.deadline, folder=work / "parts",
        environment=environment(work), changed=report.update)
    for path in args.passed_in:
        schedule.outcomes |= passed_before(parts, read_earlier(path), where=path.name)
    schedule.outcomes |= passed_before(parts, earlier)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: schedule.stop("interrupted"))
    try:
        schedule.run()
    finally:
        end_orphans()
    report.update(schedule)
    print(f"\n{table(schedule)}\n{out}")
    return 0 if accepted(list(schedule.outcomes.values())) else 1


def end_orphans() -> None:
    """End what parts have left that nobody saw being started: it has become this process's."""
    table = all_running()
    own = Process(os.getpid(), table[os.getpid()].started)
    kill(descendants({own}, table) - {own})


def choose(parts: list[Part], *, only: list[str] | None, skip: list[str]) -> list[Part]:
    """Parts by the patterns of their names, and those that these come after.

    Raises:
        SystemExit: naming a pattern that fits no part.
    """
    for pattern in (*(only or ()), *skip):
        if not any(fnmatch.fnmatch(part.name, pattern) for part in parts):
            sys.exit(f"error: no part is called {pattern!r}; --list shows their names")

    def fits(name: str, patterns: list[str]) -> bool:
        return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)

    chosen = {part.name for part in parts
              if (only is None or fits(part.name, only)) and not fits(part.name, skip)}
    chosen = needed(chosen, parts)
    return [replace(part, behind=tuple(name for name in part.behind if name in chosen))
            for part in parts if part.name in chosen]


def prepare_folder(work: Path) -> None:
    """What needs no model: problems, functions of the pages, and `python` for their commands."""
    work.mkdir(parents=True)
    make_problems(work / "problems", count=256, prompt_tokens=64)
    pages = "".join((REPO / page).read_text() for page in ("README.md", "docs/environments.md"))
    for name, module in {"brevity": "my_rewards.py", "again": "my_steps.py",
                         "load_environment": "my_env.py"}.items():
        source = next(block for block in blocks(pages, "python")
                      if re.search(rf"^def {name}\(", block, flags=re.MULTILINE))
        (work / module).write_text(source)
    python = work / "bin" / "python"
    python.parent.mkdir()
    # No link: an environment's interpreter finds its packages by its own path.
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    python.chmod(0o755)


def environment(work: Path) -> dict[str, str]:
    """Variables of all parts."""
    paths = [str(REPO), str(work), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"WORK": str(work), "REPO": str(REPO), "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1",
            "PATH": f"{work / 'bin'}{os.pathsep}{os.environ['PATH']}"}


def print_plan(parts: list[Part]) -> None:
    for part in parts:
        traits = [f"{part.gpus} GPU{'s' * (part.gpus > 1)}", f"{part.gib:g} GiB",
                  f"{part.limit:g} s", *["alone"] * part.alone,
                  *[f"after {name}" for name in part.after if name != PREPARE],
                  *[f"skipped: {part.missing}"] * bool(part.missing)]
        print(f"{part.name}  ({', '.join(traits)})")
        print("".join(f"    {line}\n" for line in part.script.splitlines()))
    print("Not run:")
    for command, why in not_run().items():
        print(f"    {command.splitlines()[0]}: {why}")


if __name__ == "__main__":
    main()
