"""``python -m grpo.run.plan``: what a run would take, layout by layout, before anything is started.

    python -m grpo.run.plan model.name=Qwen/Qwen2.5-7B-Instruct num_gpus=16

Further arguments are keys of the run, as both scripts take them; devices that are given
(train_model.num_devices=4) stay as they are. Keys of the plan itself:

    num_gpus=16          GPUs there are; with device=cpu processes of this machine
    gpus_per_host=8      the trainer and each engine are on one host
    gpu_memory_gib=null  null: of this machine's GPU; without one 139.8, which an H200 has
    prompt_tokens=256    of a prompt
    response_tokens=null mean of a completion; null: half of inference_model.max_tokens
    sigma=0.6            standard deviation of the logarithm of the lengths; 0: all alike
    calibrate=false      true: times are measured here, for at most 20 s, with the model of the run
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from grpo.config.keys import ConfigError, unknown_key
from grpo.run.cli.names import recipes, with_env_groups
from grpo.run.plan.options import PlanOptions, split_options
from grpo.system.command_line import Parser, errors_in_a_line

_ROWS = 12
#: Keys of a run without a section.
_BARE = ("device", "preset", "env")


def main(argv: list[str] | None = None, *, prog: str = "python -m grpo.run.plan") -> None:
    """Print a plan."""
    parser = Parser(prog=prog, description=__doc__)
    parser.add_argument("--config-name", default="grpo_async_gsm8k",
                        help="recipe of grpo-async.py (default: grpo_async_gsm8k)")
    parser.add_argument("--rows", type=int, default=_ROWS, help=f"layouts shown (default: {_ROWS})")
    parser.add_argument("keys", nargs="*", metavar="key=value")
    args = parser.parse_intermixed_args(argv)
    with errors_in_a_line(ValueError, OSError, ImportError, switch="HYDRA_FULL_ERROR"):
        for text in args.keys:
            _check_bare(text)
        options, keys = split_options(args.keys)
        print(_plan(options, args.config_name, keys, rows=max(1, args.rows)))


def _check_bare(text: str) -> None:
    key, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"{text}: has no value; write {text}=VALUE")
    if key == "resume":
        raise ConfigError("resume: a plan is of a new run; remove it")
    if "." not in key and key not in (*PlanOptions.model_fields, *_BARE):
        raise ConfigError(unknown_key(key, value, [*PlanOptions.model_fields, *_BARE]))


def _say(text: str) -> None:
    """What takes its time, on standard error: the page alone goes into a file."""
    print(text, file=sys.stderr, flush=True)


def _plan(options: PlanOptions, recipe: str, keys: list[str], *, rows: int) -> str:
    from grpo.run.cli.script import check_names

    keys = with_env_groups(keys, recipes())
    check_names(recipes(), recipe, keys)
    if "async" not in recipe:
        raise ConfigError(f"--config-name {recipe}: give a recipe of grpo-async.py, which has the "
                          "keys of both scripts, such as grpo_async_gsm8k")
    _say("loading PyTorch and Transformers")
    import hydra

    import grpo.run.cli  # noqa: F401  shares the cores, before PyTorch is imported
    from grpo.config.asynchronous import AsyncConfig
    from grpo.config.schema import load_config

    with hydra.initialize_config_dir(str(recipes()), version_base=None):
        config = load_config(hydra.compose(recipe, overrides=keys), AsyncConfig)
    from grpo.run.plan.page import page
    from grpo.run.plan.planner import make_planner

    given = frozenset(key.partition("=")[0].lstrip("+") for key in keys)
    with tempfile.TemporaryDirectory() as folder:
        planner = make_planner(config, given, options, Path(folder))
        _say(f"simulating {len(list(planner.layouts()))} layouts")
        plans, refused = planner.plans()
        return page(planner, plans, [recipe, *keys], rows=rows, refused=refused)


if __name__ == "__main__":
    main(sys.argv[1:])
