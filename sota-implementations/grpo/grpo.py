"""GRPO, synchronous: generate, score, update, publish, repeat.

    python sota-implementations/grpo/grpo.py                        # embedded model, no GPU needed
    python sota-implementations/grpo/grpo.py --config-name grpo_gsm8k \\
        model.name=Qwen/Qwen2.5-1.5B-Instruct                       # one GPU

One process holds everything, unless told otherwise: a vLLM engine generates, a Hugging Face model
trains, and both read the same memory, so a weight update costs no copy. With devices of their own
(``inference_model.num_devices``, ``ref_model.num_devices``) engines and reference are workers on
Ray. Every key is in ``config/``; unknown keys and keys that the chosen mode would ignore are
errors. ``grpo train`` is this script where only the package is installed.
"""

import sys
from contextlib import ExitStack
from pathlib import Path

# A script's own folder is on its path, where this very file would be found as the package `grpo`.
HERE = Path(__file__).resolve().parent
CONFIG = HERE.parents[1] / "config"
sys.path = [str(HERE.parents[1]), *(p for p in sys.path if Path(p).resolve() != HERE)]

if __name__ == "__main__":  # before PyTorch is imported: help and misspelt keys take no time
    from grpo.training.stopping import interrupts_end_at_once

    interrupts_end_at_once()
    from grpo.run.cli.script import look_ahead, what_runs

    look_ahead(CONFIG, "grpo")
    from grpo.run.ahead import start_ahead

    start_ahead(what_runs(CONFIG, "grpo"))  # workers, if there are any, import meanwhile

import grpo.run.cli  # noqa: F401  shares the cores, before PyTorch is imported
from grpo.system.collection import without_collection

with without_collection():  # it would take a third of this time
    import hydra
    from omegaconf import DictConfig

    from grpo.config.schema import Config
    from grpo.run.assemble import assemble
    from grpo.run.cli.endings import bad_input_in_a_line, endings_in_a_line
    from grpo.run.cli.steps import check_keys, fit, open_folder


@hydra.main(version_base=None, config_path="../../config", config_name="grpo")
def main(cfg: DictConfig) -> None:
    with endings_in_a_line(), ExitStack() as at_end:  # a sweep starts the next run in this process
        with bad_input_in_a_line():
            config = check_keys(cfg, Config)
            run_dir, checkpoint = open_folder(config, at_end)
            trainer = assemble(config, run_dir, checkpoint, at_end)
        fit(trainer, config)  # generate -> score -> compare -> update -> publish -> prove -> report


if __name__ == "__main__":
    main()
