"""The offline trainer: a model, a server that generates for it, problems by seed.

    python sota-implementations/grpo/grpo-offline.py --config-name offline_smoke   # no server
    python sota-implementations/grpo/grpo-offline.py model.train_id=Qwen/Qwen2.5-1.5B-Instruct \\
        generation.base_url=http://127.0.0.1:8000

Its keys (``config/offline_grpo.yaml``) are translated into those of ``grpo.py``, whose loop runs.
``docs/offline.md`` says what a server must be able to do.
"""

import sys
from pathlib import Path

# A script's own folder is on its path, where grpo.py would be found as the package `grpo`.
HERE = Path(__file__).resolve().parent
sys.path = [str(HERE.parents[1]), *(p for p in sys.path if Path(p).resolve() != HERE)]

from grpo.run.cli.offline import main

if __name__ == "__main__":
    main(sys.argv[1:], prog=sys.argv[0])
