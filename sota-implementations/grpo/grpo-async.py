"""GRPO, asynchronous: workers generate all the time, the trainer trains all the time.

    python sota-implementations/grpo/grpo-async.py inference_model.num_devices=2   # no GPU needed
    python sota-implementations/grpo/grpo-async.py --config-name grpo_async_gsm8k \\
        model.name=Qwen/Qwen2.5-1.5B-Instruct                       # two GPUs: one trains

Ray starts and watches the workers; each has an engine, an environment and its rewards. Rollouts may
be ``train.staleness`` weight updates old and no older; at 0 the run is that of ``grpo.py``. Who
gets which GPU is decided by ``num_devices`` or ``devices`` of ``train_model``, ``ref_model`` and
``inference_model``. A worker that dies is replaced; a run that cannot go on leaves a checkpoint for
``resume=auto``. ``grpo train-async`` is this script where only the package is installed.
"""

import sys
from contextlib import ExitStack
from pathlib import Path

# A script's own folder is on its path, where `grpo.py` would be found as the package `grpo`.
HERE = Path(__file__).resolve().parent
CONFIG = HERE.parents[1] / "config"
sys.path = [str(HERE.parents[1]), *(p for p in sys.path if Path(p).resolve() != HERE)]

if __name__ == "__main__":  # before PyTorch is imported: help and misspelt keys take no time
    from grpo.training.stopping import interrupts_end_at_once

    interrupts_end_at_once()
    from grpo.run.cli.script import look_ahead, what_runs

    look_ahead(CONFIG, "grpo_async")
    from grpo.run.ahead import start_ahead

    start_ahead(what_runs(CONFIG, "grpo_async"))
    print("loading PyTorch, TorchRL and Transformers", flush=True)

import grpo.run.cli  # noqa: F401  shares the cores, before PyTorch is imported
from grpo.system.collection import without_collection

with without_collection():  # it would take a third of this time
    import hydra
    from omegaconf import DictConfig

    from grpo.config.asynchronous import AsyncConfig
    from grpo.run.assemble import assemble_async
    from grpo.run.cli.endings import bad_input_in_a_line, endings_in_a_line
    from grpo.run.cli.steps import check_keys, fit, open_folder


@hydra.main(version_base=None, config_path="../../config", config_name="grpo_async")
def main(cfg: DictConfig) -> None:
    with endings_in_a_line(), ExitStack() as at_end:
        with bad_input_in_a_line():
            config = check_keys(cfg, AsyncConfig)
            run_dir, checkpoint = open_folder(config, at_end)
            trainer = assemble_async(config, run_dir, checkpoint, at_end)
        fit(trainer, config)  # workers generate all the time, the trainer trains all the time


if __name__ == "__main__":
    main()
