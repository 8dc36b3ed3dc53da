"""What one process can schedule: seconds of the real scheduler a step, and calls to Ray workers.

    python benchmarks/driver_rate.py --out benchmarks/results/driver_rate_cpu.json

No model: groups are handed out, finished in a random order, taken and published by the very
:class:`~grpo.collectors.schedule.RolloutSchedule` of a run, as its collector does. Then small
answers are asked of two actors, as the collector asks each worker twice a second for what is
finished.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path

from machine import Recording

from grpo.collectors.schedule import RolloutSchedule

SIZES = ((8, 64), (64, 512), (1024, 4096))  # engines, groups of a batch


def schedule_seconds(engines: int, groups: int, *, steps: int, seed: int = 0) -> float:
    """Seconds a step."""
    schedule, draw = RolloutSchedule(groups, staleness=1), random.Random(seed)
    held: list[int] = []
    each = -(-2 * groups // engines)
    seconds = 0.0
    for version in range(1, steps + 1):
        draw.shuffle(held)
        begin = time.perf_counter()
        while (batch := schedule.take()) is None:
            for leases in schedule.deal(range(engines), each=each, now=0.0).values():
                held += [lease.id for lease in leases]
            # One worker's report at a time, after each of which the collector hands out again.
            for _ in range(each):
                schedule.finish(held.pop(), None, version=schedule.version)
        schedule.publish(version)
        seconds += time.perf_counter() - begin
        assert len(batch) == groups
    return seconds / steps


def ray_calls(count: int) -> float:
    """Calls a second that one process sends and takes the answers of."""
    import ray

    class Worker:
        def finished(self) -> list[int]:
            return []

    ray.init(address="local", num_cpus=3, include_dashboard=False, log_to_driver=False,
             logging_level="ERROR")
    try:
        workers = [ray.remote(Worker).options(enable_task_events=False).remote() for _ in range(2)]
        ray.get([worker.finished.remote() for worker in workers], timeout=120)
        begin, waiting = time.perf_counter(), []
        for number in range(count):
            waiting.append(workers[number % 2].finished.remote())
            if len(waiting) >= 64:
                ready, waiting = ray.wait(waiting, num_returns=1, timeout=60)
                ray.get(ready, timeout=60)
        ray.get(waiting, timeout=60)
        return count / (time.perf_counter() - begin)
    finally:
        ray.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--calls", type=int, default=3000, help="to Ray; 0: none")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    recording = Recording("driver_rate", args.out, steps=args.steps)
    recording.describe_machine()
    recording.add(schedule=[
        {"engines": engines, "groups": groups,
         "seconds_a_step": schedule_seconds(engines, groups, steps=args.steps)}
        for engines, groups in SIZES])
    if args.calls:
        recording.add(ray_calls_per_second=ray_calls(args.calls))
    recording.finish()


if __name__ == "__main__":
    main()
