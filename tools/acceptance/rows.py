"""What an acceptance runs: the commands of the pages on less work, the GPU's tests, benchmarks.

The commands are read from the pages, so a new one is run without a line here, or refused by
:func:`all_parts` if it is of a kind that nobody has said how to run. Models are random and made on
the spot; ``$WORK`` and ``$REPO`` stand for the acceptance's folder and the repository.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from acceptance.figures import read_benchmark, read_pytest, read_run
from acceptance.pages import REPO, Command, page_commands
from acceptance.schedule import Part

SCRIPT = "python sota-implementations/grpo/grpo.py"
ASYNC_SCRIPT = "python sota-implementations/grpo/grpo-async.py"
SERVER = "python -m grpo.server.serve"
ATROPOS = "atropos-grpo-run"
PREPARE = "models and machine"

#: What `make` runs, for hosts that have an environment of their own.
MAKE = {"make train": SCRIPT}
#: Commands that no part runs, and why.
NOT_RUN = {
    "make test": "the fast tests need no GPU",
    "make gpu-acceptance": "is this program",
    "make atropos-env": "builds an environment",
    "make train-atropos": f"is short for the first {ATROPOS} of examples/atropos/README.md",
}
#: Starts of commands that no part runs, and why.
BY_HAND = {
    "MODEL=$(": f"the four programs by hand are those that {ATROPOS} starts",
    ".venv/bin/python -m grpo.": "the same",
    ".venv-atropos/bin/python ": "the same",
    "python -m grpo.atropos.forward": "leads ports to a server that was started by hand",
}
#: What worlds of environments need, by the name of their package.
NEEDS = {"reasoning_gym": "reasoning-gym", "verifiers": "'verifiers>=0.1.14,<0.2'"}

#: What stands on the pages for something that the reader has.
STAND_INS = {
    "Qwen/Qwen2.5-1.5B-Instruct": "$WORK/models/1.5b", "path/to/gsm8k": "$WORK/problems",
    "path/to/teacher": "$WORK/models/tiny", "path/to/model": "$WORK/models/tiny",
    "path/to/environment.py": "examples/atropos/arithmetic_env.py",
    "sota-implementations/": "$REPO/sota-implementations/", "examples/": "$REPO/examples/",
}

SMALL_ITERATIONS, SMALL_ROWS, SMALL_REPEATS = 3, 32, 4
#: Makes a command with the embedded model short. What the page sets stays; there are as many
#: prompts as make ``SMALL_ROWS`` rows.
SMALL = ("model.warm_start_steps=20", "env.num_envs={prompts}", f"env.repeats={SMALL_REPEATS}",
         "env.task.num_test=8", "env.reward=negative_length", "inference_model.max_tokens=8",
         "train.total_dialog_turns=96", "train.eval_frequency=0", "train.checkpoint_frequency=0",
         "optimizer.lr=1e-3")
#: Of those, what environments of Atropos bring themselves.
NOT_OF_ATROPOS = ("env.task.num_test", "env.reward", "inference_model.max_tokens",
                  "train.eval_frequency")
#: The same for a random model of real size. Nearly all its tokens stand for no character, so only
#: a reward by length differs within a group.
SMALLER_LARGE = (
    "env.data_path=$WORK/problems", "env.num_envs=2", "env.repeats=4", "env.task.num_test=8",
    "env.reward=my_rewards:brevity", "inference_model.max_tokens=64",
    "train.total_dialog_turns=32", "train.eval_frequency=0", "train.checkpoint_frequency=0")
LARGE_ITERATIONS = 4

#: GiB of a GPU that a run takes, with room: by model, and for adapters. Two of the largest fit on a
#: GPU of 80 GB.
GIB = {"embedded": 2.5, "0.5b": 16.5, "1.5b": 36.0}
GIB_ADAPTERS = {"embedded": 2.5, "0.5b": 11.0, "1.5b": 24.0}
GIB_SERVED = 43.0  # of 1.5 B, with an engine in another process, whose KV cache is 4 GiB

GSM8K = f"{SCRIPT} --config-name grpo_gsm8k model.name=$WORK/models"
GSM8K_ASYNC = f"{ASYNC_SCRIPT} --config-name grpo_async_gsm8k model.name=$WORK/models"
LORA = "train_model.lora.enabled=true optimizer.lr=1e-3"
#: Combinations that no page has as a command.
VARIANTS = {
    "0.5b, packing, checkpointing, reference":
        f"{GSM8K}/0.5b train.packing=true train_model.gradient_checkpointing=true "
        "train.kl_to_ref_coeff=0.01",
    "0.5b, adapters as views, compiled":
        f"{GSM8K}/0.5b {LORA} train_model.lora.alpha=16 train_model.compile=true",
    "0.5b, adapters written": f"{GSM8K}/0.5b {LORA} train_model.compile=false",
    "0.5b, adapters on 4 bits": f"{GSM8K}/0.5b {LORA} train_model.quantization=nf4",
    "0.5b, engine=process, compiled":
        f"{GSM8K}/0.5b inference_model.engine=process train_model.compile=true",
    "0.5b, engine=process, adapters": f"{GSM8K}/0.5b inference_model.engine=process {LORA}",
    "0.5b, engine=server, compiled":
        f"{GSM8K}/0.5b inference_model.engine=server train_model.compile=true",
}
VARIANTS_OF_TWO_GPUS = {
    "0.5b, one trains, one generates, adapters": f"{GSM8K_ASYNC}/0.5b {LORA}",
    "1.5b, one trains, one generates, compiled": f"{GSM8K_ASYNC}/1.5b train_model.compile=true",
    "1.5b, two train, compiled": f"{GSM8K}/1.5b inference_model.engine=process "
        "train_model.num_devices=2 train_model.compile=true",
    "0.5b, two train, adapters":
        f"{GSM8K}/0.5b inference_model.engine=process train_model.num_devices=2 {LORA}",
}

WORK = "--shape 1.5b --model $WORK/models/1.5b"
OURS, PEER = "step time with the defaults", "TRL + Liger on the same work"
#: Name -> program and options in benchmarks/, and the keys of its result for the table.
BENCHMARKS = {
    OURS: (f"step_time.py {WORK} --iterations 10", ("seconds/step", "canary_share",
                                                   "memory_gib/peak")),
    PEER: (f"peer_trl.py {WORK} --iterations 7", ("seconds/step", "memory_gib/peak")),
    # The hashes alone: what they cost in a run is part of the canary's share above.
    "cost of the proof": ("proof_cost.py --shape 1.5b --ways memory --repeats 5",
                          ("ways/memory/whole_milliseconds", "ways/memory/share_of_step")),
}
BESIDE = "step time beside TRL + Liger"
AT_MOST = 0.45  # of the peer's seconds

#: Files of test/gpu -> GPUs that they need, and have use for; the others take one.
TESTS_OF_SEVERAL_GPUS = {"test_parallel.py": (2, 2), "test_transfer.py": (1, 3)}
#: Files of test/gpu that take more of a GPU than the others.
TEST_GIB = {"test_server_sleep.py": 25.0, "test_replay.py": 10.0}
#: What a command says that concerns the engine or the weights; others may generate by Transformers.
OF_THE_ENGINE = ("inference_model.", "train_model.", "--config-name", "--multirun", "resume=")


class UnknownCommandError(ValueError):
    """A page has a command of a kind that nobody has said how to run."""


def all_parts(gpus: int, *, root: Path = REPO) -> list[Part]:
    """What is run on so many GPUs, in the order in which it is begun.

    Raises:
        UnknownCommandError: naming the command.
    """
    pages = [part for command in page_commands(root) for part in command_parts(command)]
    first = [part for part in pages if part.name.startswith("README")]
    parts = [
        # What is timed goes first: nothing has to end before it may begin.
        Part(PREPARE, "python $REPO/tools/acceptance/prepare.py $WORK", limit=120, gib=8),
        *benchmarks(), *first, *gpu_tests(gpus),
        *(part for part in pages if part.name.startswith("docs/weights")), *variants(),
        *(part for part in pages if part not in first and "docs/weights" not in part.name),
    ]
    parts = [replace(part, missing=part.missing or f"needs {part.gpus} GPUs")
             if part.gpus > max(gpus, 1) else part for part in _once(parts)]
    return in_order(parts)


def in_order(parts: list[Part]) -> list[Part]:
    """Runs of a model behind the first one of it; what takes long before what does not.

    The first fills the caches of compiled code, which the others would otherwise all fill at once:
    of those whose engine is in the run's process and has no adapters, the one that took least.
    What takes several GPUs, and then what took longest before, goes before the rest: begun last, it
    would still run when nothing else does. Before what runs alone go the first runs, so that the
    caches are there, and beside them what does not read these.
    """
    took = seconds_before()
    early, runs, leaders = [], [], {}
    for part in parts:
        if part.missing:
            continue
        if (part.name.startswith("test/gpu/") and part.gpus == 1
                or "backend=transformers" in part.script):
            early.append(part.name)
        elif ("/sota-implementations/" in part.script
              and "lora.alpha=16 train_model.compile=true" not in part.script):
            runs.append(part.name)
    for part in sorted(parts, key=lambda part: took.get(part.name, part.limit)):
        if part.name in runs and part.gpus == 1 and not re.search(r"engine=|lora\.", part.script):
            leaders.setdefault(model_of(part.script), part.name)
    early += leaders.values()
    behind = []
    for part in parts:
        leader = leaders.get(model_of(part.script))
        if part.alone:
            part = replace(part, behind=tuple(early))
        elif part.name in runs and leader and leader != part.name:
            part = replace(part, behind=(leader,))
        behind.append(part)
    return sorted(behind, key=lambda part: (
        part.name != PREPARE, part.name not in leaders.values(),
        part.name not in early and not part.alone,
        -part.gpus, -took.get(part.name, part.limit)))


def seconds_before() -> dict[str, float]:
    """What each part took in the results that are here, at most."""
    took: dict[str, float] = {}
    for path in sorted((REPO / "benchmarks" / "results").glob("acceptance_[0-9].json")):
        for part in json.loads(path.read_text())["parts"]:
            took[part["name"]] = max(took.get(part["name"], 0.0), part.get("seconds") or 0.0)
    return took


def _once(parts: list[Part]) -> Iterator[Part]:
    """Commands that stand on several pages are run for the first of them."""
    scripts: dict[str, Part] = {}
    for part in parts:
        earlier = scripts.setdefault(part.script, part)
        if earlier is not part:
            scripts[part.script] = replace(earlier, covers=earlier.covers + part.covers)
    yield from scripts.values()


# -- commands of the pages ------------------------------------------------------------------------


def command_parts(command: Command) -> Iterator[Part]:
    """What runs a page's command: one part, or none if :data:`NOT_RUN` or :data:`BY_HAND` says so.

    Raises:
        UnknownCommandError: naming the command.
    """
    text = MAKE.get(command.text, command.text)
    name = f"{command.page.removesuffix('.md')}: {_short(command.text)}"
    if text in NOT_RUN or text.startswith(tuple(BY_HAND)):
        return
    if text.startswith(ATROPOS):
        part = atropos_part(name, text)
    elif text.startswith(SERVER):
        return  # with the run that names its address
    elif "inference_model.url=" in text:
        part = served_part(name, text)
    elif "resume=" in text:
        part = resumed_part(name, text)
    elif "env=atropos" in text:
        part = script_atropos_part(name, text)
    elif text.startswith((f"{SCRIPT} ", f"{ASYNC_SCRIPT} ")) or text == SCRIPT:
        part = run_part(name, text)
    else:
        raise UnknownCommandError(
            f"{command.page} has the command {command.text!r}, and nobody has said how "
            "tools/gpu_acceptance.py runs it; add it to tools/acceptance/rows.py")
    yield replace(part, covers=(*part.covers, command.text))


def _short(text: str) -> str:
    return text.replace("python sota-implementations/grpo/", "").replace(
        "Qwen/Qwen2.5-", "").replace("-Instruct", "")


def run_part(name: str, text: str) -> Part:
    """A run of ``grpo.py`` or ``grpo-async.py``, on less work."""
    if text.startswith(f"{SCRIPT} ") and not any(word in text for word in OF_THE_ENGINE):
        text += " inference_model.backend=transformers"  # whose engine starts at once
    if "weight_sync=restart" in text:
        text += f" train.total_dialog_turns={SMALL_ROWS}"  # a new server takes a minute
    script, model = smaller(text), model_of(text)
    quick = "backend=transformers" in text
    sweep = re.search(r"--multirun \S+=(\S+)", text)
    runs = len(sweep[1].split(",")) if sweep else 1
    iterations = SMALL_ITERATIONS if model == "embedded" else LARGE_ITERATIONS
    iterations = 1 if "weight_sync=restart" in text else iterations
    return Part(
        name, script,
        limit=(100.0 if quick else 200.0 if model == "embedded" else 300.0) + 40.0 * (runs - 1)
        + 100.0 * ("weight_sync=restart" in text),
        gpus=devices_of(text), gib=(GIB_ADAPTERS if "lora.enabled=true" in text else GIB)[model]
        * max(1, text.count(".devices=[") // devices_of(text)),  # roles that share a device
        after=() if model == "embedded" and "$WORK/models" not in script else (PREPARE,),
        read=read_run(iterations, runs=runs, says="held-out accuracy"),
        missing=_missing(text))


def script_atropos_part(name: str, text: str) -> Part:
    """A run of a script that starts a hub and an environment of atroposlib."""
    run, python = run_part(name, text), _atropos_python()
    return replace(
        run, script=f"export GRPO_ATROPOS_PYTHON={shlex.quote(str(python))}\n{run.script}",
        limit=run.limit + 60.0, read=read_run(SMALL_ITERATIONS, says="iterations"),
        missing=_without_atropos(python))


def _atropos_python() -> Path:
    """Interpreter of the environments."""
    return Path(os.environ.get("GRPO_ATROPOS_PYTHON") or REPO / ".venv-atropos/bin/python")


def _without_atropos(python: Path) -> str:
    return "" if python.exists() else "needs an environment of atroposlib: `make atropos-env`"


def _missing(text: str) -> str:
    """What a command needs that is not installed."""
    for package, name in NEEDS.items():
        if f"env={package}" in text and importlib.util.find_spec(package) is None:
            return f"needs `pip install {name}`"
    if "quantization=" in text and importlib.util.find_spec("torchao") is None:
        return "needs `pip install 'torchao>=0.18'`"
    return ""


def smaller(text: str) -> str:
    """The command with what the reader has replaced, and made short by further settings."""
    for said, ours in STAND_INS.items():
        text = text.replace(said, ours)
    page = dict(word.partition("=")[::2] for word in shlex.split(text))
    prompts = SMALL_ROWS // int(page.get("env.repeats", SMALL_REPEATS))
    given = {*page, *(NOT_OF_ATROPOS if "env=atropos" in text else ())}
    settings = [s.format(prompts=prompts) for s in SMALL] if model_of(text) == "embedded" else (
        SMALLER_LARGE)
    if "model.name=" in text:
        given.add("model.warm_start_steps")
    return " ".join([text, *(s for s in settings if s.partition("=")[0] not in given)])


def model_of(text: str) -> str:
    """Which of the models a command trains."""
    found = re.search(r"model\.name=\S*(0\.5|1\.5)[bB]", text)
    return f"{found[1]}b" if found else "embedded"


def has_workers(text: str) -> bool:
    """Whether engines are workers on Ray."""
    return text.startswith(ASYNC_SCRIPT) or bool(re.search(
        r"(inference_model|ref_model)\.num_devices=", text))


def devices_of(text: str) -> int:
    """GPUs that a command takes, by what it says of devices."""
    def said(section: str, default: int) -> int:
        found = re.search(rf"{section}\.num_devices=(\d+)", text)
        return int(found[1]) if found else default

    named = re.findall(r"\.devices=\[([\d,]+)\]", text)
    if named:
        return len(set(",".join(named).split(",")))
    if not has_workers(text):
        return said("train_model", 1)  # the engine is on the first of them
    return said("train_model", 1) + said("inference_model", 1) + said("ref_model", 0)


def resumed_part(name: str, text: str) -> Part:
    """A run that leaves checkpoints, and the command that goes on from the newest."""
    # A learning rate that falls towards its end would make the longer run another one.
    text += " optimizer.schedule=constant train.checkpoint_frequency=1"
    first = smaller(text.replace(" resume=auto", ""))
    longer = smaller(f"{text} train.total_dialog_turns=160")
    return replace(run_part(name, text), script=f"{first}\n{longer}", limit=240.0,
                   read=read_run(5, says="resumed at iteration 3"))


def served_part(name: str, text: str) -> Part:
    """A run with a server that was started before, as the page has it."""
    said = next(other.text for other in page_commands() if other.text.startswith(SERVER))
    server = said.replace("path/to/model", STAND_INS["path/to/model"])
    url = re.search(r"inference_model\.url=(\S+)", text)[1]
    run = run_part(name, f"{text} model.name={STAND_INS['path/to/model']}")
    script = f"""{server} --kv-cache-memory-bytes 1073741824 &
server=$!
trap 'kill $server; wait $server || true' EXIT
until python -c 'import urllib.request as r; r.urlopen("{url}/health", timeout=5)' 2>/dev/null
do kill -0 $server; sleep 1; done
{run.script}"""
    return replace(run, script=script, limit=240.0, gib=10.0, claims=frozenset({url}),
                   covers=(said,))


def atropos_part(name: str, text: str) -> Part:
    """Hub, engine server, an environment of atroposlib and the trainer; five steps."""
    large = "Qwen/" in text
    text = re.sub(r" --training-steps \d+", "", text)
    text = text.replace(ATROPOS, "python -m grpo.run.cli.launch")
    for said, ours in STAND_INS.items():
        text = text.replace(said, ours)
    forwarded = re.search(r"--forward-ports (\S+)", text)
    number = 1 if large else 2 if forwarded else 3
    ports = 8100 + number, 9100 + number
    text += (f" --atropos-url http://127.0.0.1:{ports[0]} --vllm-port {ports[1]} "
             "--training-steps 5 --save-path out --log-dir logs")
    if "--gpu-memory-utilization" not in text:  # whose default is nearly half of the GPU
        text += f" --kv-cache-memory-bytes {4 * 2**30 if large else 2**28}"
    if large:
        # All answers of a random model are wrong alike.
        text += (" --env-flag env.ensure_scores_are_not_same=false --env-flag env.max_new_tokens=64"
                 " --max-model-len 1024 --checkpoint-interval 0")
    claims = frozenset(map(str, ports)) | set(forwarded[1].split(",") if forwarded else ())
    python = _atropos_python()
    return Part(
        name, f"export GRPO_ATROPOS_PYTHON={shlex.quote(str(python))}\n{text}", limit=300.0,
        gib=GIB_SERVED if large else GIB["embedded"], after=(PREPARE,) if large else (),
        claims=claims, read=read_run(5), missing=_without_atropos(python))


# -- what no page has -----------------------------------------------------------------------------


def variants() -> Iterator[Part]:
    """Combinations of :data:`VARIANTS`."""
    for name, text in {**VARIANTS, **VARIANTS_OF_TWO_GPUS}.items():
        yield run_part(name, text)


def gpu_tests(gpus: int) -> Iterator[Part]:
    """Each file of test/gpu."""
    for path in sorted((REPO / "test" / "gpu").glob("test_*.py")):
        least, most = TESTS_OF_SEVERAL_GPUS.get(path.name, (1, 1))
        yield Part(
            f"test/gpu/{path.name}",
            "cd $REPO\npython -m pytest -q -m gpu -p no:cacheprovider -p no:warnings "
            f"--tb=short --show-capture=no test/gpu/{path.name}", limit=300.0,
            gib=TEST_GIB.get(path.name, 4.0), gpus=max(least, min(gpus, most)),
            read=read_pytest)


def benchmarks() -> Iterator[Part]:
    """Those of :data:`BENCHMARKS`, each alone, and the comparison of ours with the peer's."""
    peer_missing = "" if importlib.util.find_spec("trl") and importlib.util.find_spec(
        "liger_kernel") else "needs `pip install trl liger-kernel datasets`"
    for name, (command, shown) in BENCHMARKS.items():
        copy = {OURS: "\ncp result.json $WORK/ours.json", PEER: "\ncp result.json $WORK/peer.json"}
        yield Part(
            name, f"python $REPO/benchmarks/{command} --out result.json{copy.get(name, '')}",
            limit=240.0, gib=120.0, alone=True, after=(PREPARE,), read=read_benchmark(*shown),
            missing=peer_missing if name == PEER else "")
    # After the last that runs alone, which would otherwise wait for what begins beside this one.
    yield Part(
        BESIDE, "python $REPO/tools/acceptance/compare.py $WORK/ours.json $WORK/peer.json "
        f"--at-most {AT_MOST:g} --out result.json", limit=30.0, after=(OURS, PEER),
        read=read_benchmark("ratio", "memory_gib", "peer_memory_gib"), missing=peer_missing)


def not_run(root: Path = REPO) -> dict[str, str]:
    """Commands of the pages that no part runs, and why."""
    reasons = {}
    for command in page_commands(root):
        for start, why in {**BY_HAND, **NOT_RUN}.items():
            if command.text.startswith(start):
                reasons[command.text] = why
    return reasons

