"""The rows of docs/commands.md about the offline trainer, and the page docs/offline.md."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from grpo.config.offline import OfflineConfig, translate
from grpo.config.schema import load_config
from grpo.report.loggers import read_jsonl

from ..config.configs import composed
from ..keys.watching import keys_of
from ..policies.real_stock import vllm_server
from ..policies.stand_in import StandIn
from ..support import REPO, code_in, commands, environment, finished, free_port
from .commands_page import OFFLINE, STOCK, Line
from .test_commands import MODEL, of_kind

PAGE = (REPO / "docs" / "offline.md").read_text()
LINES = commands(PAGE)
#: Appended to every run: the same code on less work.
SMALLER = ["model.device=cpu", "iterations=2", "generation.max_new_tokens=4", "data.difficulty=0",
           "eval.num_ids=2"]
ROWS = [row.here for row in of_kind("offline")]
SWEEPS = [here for here in ROWS if " -m " in here[0]]
SMOKE, SGLANG = ([here for here in ROWS if here not in SWEEPS and word in here[0]]
                 for word in ("offline_smoke", "sglang_server"))
OF_PAGE = [line for line in LINES if line.startswith(OFFLINE)]
HERE = [here for here in ROWS if here not in (*SWEEPS, *SMOKE, *SGLANG)]


@pytest.fixture(scope="module")
def model(tmp_path_factory, tokenizer) -> Path:
    """Untied, which vLLM for CPUs reads anew as a whole, with room for problems."""
    import torch
    from transformers import AutoModelForCausalLM

    from grpo.envs.embedded import EmbeddedSpec, small_qwen2

    folder = tmp_path_factory.mktemp("untied")
    config = small_qwen2(EmbeddedSpec(), len(tokenizer)).config
    config.tie_word_embeddings = False
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def run(line: str, folder: Path, model: Path, *more: str) -> list[dict]:
    """The metrics of a line's iterations, without the words that a reader replaces."""
    words = shlex.split(line.replace(MODEL, str(model)))[1:]
    finished([sys.executable, REPO / words[0], *words[1:], *more, "hydra.run.dir=run"], folder,
             environment(folder), seconds=800.0)
    rows = [row for row in read_jsonl(folder / "run" / "metrics.jsonl") if row["step"] > 0]
    assert len(rows) == 2 and max(row["canary/max_abs_diff"] for row in rows) < 1e-3
    assert (folder / "run" / "metrics" / "train_iter_002.json").is_file()
    return rows


def test_every_line_is_run_and_a_valid_configuration():
    assert SMOKE and SGLANG and SWEEPS and HERE and of_kind("tests") and of_kind("offline_served")
    rows = {line for row in of_kind("offline", "offline_served") for line in row.here}
    assert {line for line in LINES if " -m train." not in line} <= rows
    (server,) = (line for line in LINES if line not in OF_PAGE)
    assert Line.of(server).words[:3] == STOCK.split()
    lines = [line for line in [*LINES, *(line for row in of_kind("offline", "offline_served")
                                         for line in row.here)] if line.startswith(OFFLINE)]
    assert len(lines) > 8
    for line in lines:
        words = shlex.split(line)[2:]
        name = words[words.index("--config-name") + 1] if "--config-name" in words else (
            "offline_grpo")
        keys = [f"++{word}" if word.startswith("run.") else re.sub(r"=([^\[]*?),.*", r"=\1", word)
                for word in words if "=" in word]
        translate(load_config(composed(name, *keys), OfflineConfig))


def test_every_key_of_the_page_exists():
    sections = "|".join({key.partition(".")[0] for key in keys_of(OfflineConfig) if "." in key})
    found = {name for text in code_in(PAGE) for name in re.findall(
        rf"(?<![\w./])((?:{sections})\.[a-z][a-z_]*)(?![\w./])", text)}
    assert len(found) > 15 and found <= {*keys_of(OfflineConfig)}


@pytest.mark.slow
def test_the_smoke_test_runs(tmp_path, model):
    (line,), = SMOKE
    assert line in LINES
    run(line, tmp_path, model)


@pytest.mark.slow
@pytest.mark.parametrize("line", [*(line for here in SWEEPS for line in here),
                                  *(line for line in OF_PAGE if " -m " in line)])
def test_a_sweep_ends_with_a_table_and_a_plot(line, tmp_path):
    said = finished([sys.executable, REPO / shlex.split(line)[1], *shlex.split(line)[2:],
                     "hydra.sweep.dir=sweep"], tmp_path, environment(tmp_path), seconds=800.0)
    assert "results of the sweep" in said and "train.lr" in said
    runs = 1
    for values in re.findall(r"=([^ ]+,[^ ]+)", line):
        runs *= values.count(",") + 1
    assert len(list(tmp_path.glob("sweep/*/metrics.jsonl"))) == runs
    assert (tmp_path / "sweep" / "sweep.png").is_file()


@pytest.mark.slow
def test_rows_with_sglang_run_beside_a_stand_in(tmp_path, model):
    for (line,) in SGLANG:
        with StandIn("sglang", model) as there:
            there.context = 2048
            run(line.replace("http://127.0.0.1:30000", there.url), tmp_path, model, *SMALLER)


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize("here", HERE)
def test_rows_without_a_server_run(here, tmp_path, model):
    pytest.importorskip("vllm")
    run(here[0], tmp_path, model, *SMALLER)


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize("row", of_kind("offline_served"), ids=lambda row: row.there[-1])
def test_rows_with_vllms_own_server_run(row, tmp_path, model):
    pytest.importorskip("vllm")
    server, trainer = row.here
    line, port = Line.of(server), free_port()
    flags = line.words[3:]
    for name in ("--model", "--port"):
        place = flags.index(name)
        del flags[place:place + 2]
    with vllm_server(model, tmp_path / "server.log", *flags, "--max-model-len", "2048",
                     port=port, **line.variables) as url:
        run(trainer, tmp_path, model, f"generation.base_url={url}", *SMALLER)


@pytest.mark.slow
@pytest.mark.parametrize("row", of_kind("tests"), ids=lambda row: row.there[0])
def test_rows_that_run_tests_do(row):
    said = finished([sys.executable, *shlex.split(row.here[0])[1:]], REPO, environment(),
                    seconds=800.0)
    assert re.search(r"\d+ (passed|skipped)", said)
