"""Our step beside TRL's, from the results of one machine and hour.

    python compare.py OURS.json PEER.json --at-most 0.45

Ends with an error if our step takes more than that share of the peer's, or more memory.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path


def compare(ours: dict, peer: dict, *, at_most: float) -> tuple[dict, list[str]]:
    """Figures, and what of the two demands is not met."""
    seconds = ours["seconds"]["step"], peer["seconds"]["step"]
    memory = [max(result["memory_gib"]["peak"], default=None) for result in (ours, peer)]
    figures = {"ratio": seconds[0] / seconds[1], "at_most": at_most, "step_seconds": seconds[0],
               "peer_step_seconds": seconds[1], "memory_gib": memory[0],
               "peer_memory_gib": memory[1]}
    faults = []
    if ours["work"] != peer["work"]:
        faults.append(f"the work is not the same: {ours['work']} and {peer['work']}")
    if figures["ratio"] > at_most:
        faults.append(f"a step of {seconds[0]:.2f} s is {figures['ratio']:.2f} of the peer's "
                      f"{seconds[1]:.2f} s, more than {at_most:g}")
    if None in memory:
        faults.append("the memory in use was not measured")
    elif memory[0] > memory[1]:
        faults.append(f"{memory[0]:.1f} GiB in use at the peak, where the peer has "
                      f"{memory[1]:.1f}")
    return figures, faults


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ours", type=Path)
    parser.add_argument("peer", type=Path)
    parser.add_argument("--at-most", type=float, required=True, help="share of the peer's seconds")
    parser.add_argument("--out", type=Path, help="where the figures are written, as JSON")
    args = parser.parse_args()
    figures, faults = compare(*(json.loads(path.read_text()) for path in (args.ours, args.peer)),
                              at_most=args.at_most)
    if args.out:
        args.out.write_text(json.dumps(figures, indent=2) + "\n")
    print(json.dumps(figures, indent=2))
    sys.exit("; ".join(faults) or 0)


if __name__ == "__main__":
    main()
