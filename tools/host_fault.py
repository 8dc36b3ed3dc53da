"""Cut a host off from a Ray cluster, let another join: what a run of ``grpo-async.py`` loses by it.

    python tools/host_fault.py             # three runs: about ten minutes on two cores
    python tools/host_fault.py --table     # what stands in docs/faults.md

The hosts are network namespaces of this machine (``faults/hosts.py``), which takes root and ``ip``.
The trainer and the cluster's head are on host 1, a worker each on 2 and 3. The cable of 3 is pulled
while both generate; some steps later host 4 joins, and at last the run gets SIGTERM.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]
for _folder in (REPO / "benchmarks", REPO / "tools", REPO):
    sys.path.insert(0, str(_folder))

from faults.hosts import Hosts  # noqa: E402

RESULT = REPO / "benchmarks" / "results" / "host_fault_cpu.json"
SCRIPT = REPO / "sota-implementations" / "grpo" / "grpo-async.py"
GROUPS = 4  # of an iteration
#: How Ray's head watches the hosts: by itself it takes one for gone that has not answered within
#: 10 s, five times in a row with 3 s between them.
WATCH = {"by itself": {},
         "closely": {"RAY_health_check_period_ms": "1000", "RAY_health_check_timeout_ms": "2000"}}
#: Backends of the runs that are written down, and how hosts are watched in them.
RUNS = [("transformers", "by itself"), ("transformers", "closely"), ("vllm", "closely")]
#: Completions take long enough for some to be in hand whenever the cable is pulled.
OPTIONS = ("device=cpu", "inference_model.num_devices=2", "inference_model.max_tokens=64",
       "inference_model.ignore_eos=true", "env.reward=negative_length", f"env.num_envs={GROUPS}",
       "env.repeats=4", f"train.total_dialog_turns={100_000 * GROUPS * 4}",
       "train.eval_frequency=0", "train.checkpoint_frequency=0")


def observe(backend: str, watch: str, folder: Path, model: Path) -> dict[str, Any]:
    """Run all of it; see :func:`figures` for what is returned beside the exit code.

    Raises:
        RuntimeError: if the run ends by itself, or something does not happen in time; with what it
            has said last.
    """
    with Hosts(folder, 1, 2, 3, 4, **WATCH[watch]) as hosts:
        hosts.start_ray(1, head=True)
        hosts.start_ray(2, 3)
        run = hosts.start(1, sys.executable, str(SCRIPT), f"ray.address={hosts.address(1)}:6379",
                          "hydra.run.dir=run", f"model.name={model}",
                          f"inference_model.backend={backend}", *OPTIONS)
        place = hosts.home(1) / "run"

        def reach(what: str, condition: Callable[[dict], bool], seconds: float) -> int:
            """Wait for a row of the metrics; its step."""
            deadline = time.monotonic() + seconds
            while not ((rows := rows_of(place)) and condition(rows[-1])):
                if run.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"not reached: {what}; the run "
                                       f"{'goes on' if run.poll() is None else 'has ended'}: "
                                       + hosts.log(1).read_text()[-3000:])
                time.sleep(0.2)
            return rows[-1]["step"]

        def steps(count: int, workers: int) -> None:
            at = reach(f"{workers} workers", lambda row: row.get("async/workers") == workers, 150)
            reach(f"{count} more steps", lambda row: row["step"] >= at + count, 60)

        steps(3, 2)
        cut = hosts.cut_off(3)
        steps(3, 1)
        hosts.start_ray(4)
        joined = time.time()
        steps(3, 2)
        run.terminate()
        code = run.wait(60)
        return figures(rows_of(place), state_of(place), cut=cut, joined=joined) | {"exit": code}


def rows_of(run: Path) -> list[dict[str, Any]]:
    """Metrics of the iterations that are finished so far."""
    file = run / "metrics.jsonl"
    rows = map(json.loads, file.read_text().splitlines()) if file.exists() else ()
    return [row for row in rows if row["step"] > 0]


def state_of(run: Path) -> dict[str, Any]:
    """Of the collector, in the last checkpoint."""
    import torch

    newest = max((run / "checkpoints").glob("step_*"))
    return torch.load(newest / "state.pt", weights_only=True)["env"]


def figures(rows: list[dict[str, Any]], state: dict[str, Any], *, cut: float, joined: float
            ) -> dict[str, Any]:
    """What can be seen of a run that has ended.

    Args:
        rows: its metrics.
        state: of its collector at the end.
        cut: Unix time at which the host was cut off.
        joined: Unix time at which the other was part of the cluster.

    Returns:
        Seconds until an iteration was finished without the worker of the first, and with that of
        the second; ``workers`` as ``[seconds after the cut, step, workers]`` whenever they changed;
        ``groups``: those ``started`` and, of these, ``acknowledged`` (a worker gave them to the
        trainer finished), ``trained``, ``lost`` (acknowledged, but neither trained nor kept),
        ``again`` (in the hands of the worker that was gone, and handed out once more), ``dropped``
        and ``missing`` (of which nobody knows).
    """
    changes = [row for before, row in zip([{}, *rows], rows, strict=False)
               if row["async/workers"] != before.get("async/workers")]
    counts, ready = state["counts"], len(state["ready"])
    trained, acknowledged = state["version"] * GROUPS, int(counts["finished"])
    after = {at: [row["time"] - at for row in changes if row["time"] > at] for at in (cut, joined)}
    return {
        "noticed_after": round(after[cut][0], 1), "used_after": round(after[joined][0], 1),
        "workers": [[round(row["time"] - cut, 1), row["step"], int(row["async/workers"])]
                    for row in changes],
        "groups": {
            "started": state["next"], "acknowledged": acknowledged, "trained": trained,
            "lost": acknowledged - trained - ready, "again": int(counts["lost"]),
            "dropped": int(counts["dropped"]),
            "missing": state["next"] - trained - ready - len(state["unfinished"])},
        "restarts": int(rows[-1]["async/restarts"]),
        "canary": max(row["canary/max_abs_diff"] for row in rows)}


def problems(found: dict[str, Any]) -> list[str]:
    """What is not as promised in ``docs/async.md``."""
    groups = found["groups"]
    wrong = [f"{groups[name]} groups {name}" for name in ("lost", "missing", "dropped")
             if groups[name]]
    if not groups["again"]:
        wrong.append("the host had nothing in hand")
    if [workers for *_, workers in found["workers"]] != [2, 1, 2] or found["restarts"] != 1:
        wrong.append(f"workers {found['workers']}, {found['restarts']} restarts")
    if found["exit"] != 143:
        wrong.append(f"exit {found['exit']}")
    return wrong


def table(result: dict[str, Any]) -> str:
    """Markdown: a line a run."""
    lines = [("backend", "Ray's head watches", "noticed after", "groups in hand, sampled anew",
              "groups acknowledged", "of these lost", "the other host used after"), ("---",) * 7]
    for found in result["runs"]:
        groups = found["groups"]
        lines.append((found["backend"], found["watch"], f"{found['noticed_after']} s",
                      str(groups["again"]), str(groups["acknowledged"]), str(groups["lost"]),
                      f"{found['used_after']} s"))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def make_model(folder: Path) -> Path:
    """The small model that the runs start from."""
    from grpo.envs.embedded import EmbeddedSpec, embedded_model
    from grpo.envs.tasks import make_task

    return embedded_model(make_task("arithmetic"), EmbeddedSpec(steps=20), cache_dir=folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--table", action="store_true", help="print the table of the result")
    args = parser.parse_args()
    if args.table:
        print(table(json.loads(args.out.read_text())))
        return 0
    from machine import describe_machine, save

    result = {"benchmark": "host_fault", "complete": False, "command": "python tools/host_fault.py",
              **describe_machine(also=("ray",)), "watch": WATCH, "runs": []}
    # Ends as Ctrl-C does, so that no host and no folder stays.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    folder = Path(tempfile.mkdtemp(prefix="hosts-"))
    try:
        model = make_model(folder)
        for number, (backend, watch) in enumerate(RUNS):
            found = observe(backend, watch, folder / str(number), model)
            result["runs"].append({"backend": backend, "watch": watch, **found,
                                   "problems": problems(found)})
            result["complete"] = len(result["runs"]) == len(RUNS)
            save(result, args.out)
            print(json.dumps(result["runs"][-1]), flush=True)
    finally:
        shutil.rmtree(folder)
    return any(found["problems"] for found in result["runs"])


if __name__ == "__main__":
    sys.exit(main())
