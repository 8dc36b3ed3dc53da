"""``grpo doctor``: what of this machine and its packages would hold a run up, and how to mend it.

Each line is ok, a remark, which costs something or is only worth knowing, or a problem, with which
runs fail; after "->" is what to do. The exit code is 1 where there is a problem.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from grpo.run.doctor import gpu, host, packages
from grpo.run.doctor.findings import Check, Finding, findings
from grpo.run.doctor.probe import Probe
from grpo.system.command_line import Parser


def main(argv: Sequence[str] | None = None, *, prog: str = "python -m grpo.run.doctor") -> None:
    """Print what is found."""
    parser = Parser(prog=prog, description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    args = parser.parse_args(argv)
    found: list[Finding] = []
    for finding in findings(checks()):
        found.append(finding)
        if not args.json:
            print(finding, flush=True)
    counts = {kind: sum(finding.status == kind for finding in found)
              for kind in ("problem", "remark")}
    if args.json:
        print(json.dumps({"problems": counts["problem"], "remarks": counts["remark"],
                          "findings": [finding.as_dict() for finding in found]}, indent=2))
    else:
        print(", ".join(f"{count or 'no'} {kind}{'s' * (count != 1)}"
                        for kind, count in counts.items()))
    sys.exit(bool(counts["problem"]))


def checks() -> list[tuple[str, Check]]:
    """All of them, by name; what takes seconds is begun here, and asked for last."""
    engine = ["vllm"] if find_spec("vllm") else []
    imports = Probe("torch", *engine, "tensordict", "torchrl", "transformers")
    driver = cache(gpu.ask_driver)

    def torch() -> dict[str, Any]:
        return imports.facts().get("torch", {"error": "is not known"})

    def with_torch(check: Callable[[dict[str, Any]], Finding]) -> list[Finding]:
        return [] if "error" in torch() else [check(torch())]

    return [
        ("library", packages.check_library),
        ("shm", host.check_shm),
        ("files", host.check_files),
        *((f"port {port}", partial(host.check_port, port, use))
          for port, use in host.default_ports().items()),
        ("outputs", partial(host.check_folder, "outputs", Path("outputs"),
                            "give another, such as hydra.run.dir=/tmp/run")),
        ("cache", host.check_cache),
        ("hub", host.check_hub),
        ("variables", host.check_variables),
        ("ray", packages.check_ray),
        ("extras", packages.check_extras),
        ("driver", lambda: gpu.check_driver(driver())),
        ("GPUs", lambda: gpu.check_memory(driver())),
        ("torch", lambda: with_torch(lambda facts: gpu.check_torch(facts, driver()))),
        ("nccl", lambda: with_torch(lambda facts: gpu.check_nccl(facts, facts["devices"]))),
        ("vllm", lambda: with_torch(lambda _: packages.check_vllm(
            imports.facts().get("vllm"), gpus=len(driver().gpus)))),
        ("imports", lambda: packages.check_imports(imports.facts())),
    ]


if __name__ == "__main__":
    main()
