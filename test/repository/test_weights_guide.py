"""docs/weights.md: its commands run, its names are those of the code; and the keys and messages of
both guides are."""

from __future__ import annotations

import re
import shlex
import sys
from typing import get_args

import pytest

from grpo.config.model import EngineKind, Sync
from grpo.config.schema import Config, ConfigError, load_config
from grpo.server.serve import check, parser
from grpo.training.checkpoint import save_trained
from grpo.weights.adapters import make_lora

from ..config.configs import SECTIONS, composed
from ..support import REPO, blocks, code_in, commands, environment, finished, table_rows

GUIDE, OBJECTIVES = ((REPO / "docs" / name).read_text() for name in ("weights.md", "objectives.md"))
SCRIPT = "python sota-implementations/grpo/grpo.py"
SERVER = "python -m grpo.server.serve"
SMALLER = ["model.warm_start_steps=5", "env.num_envs=2", "env.repeats=2",
           "inference_model.max_tokens=4", "train.total_dialog_turns=8",
           "train.checkpoint_frequency=0", "env.task.num_test=8", "inference_model.backend=vllm"]


LINES = commands(GUIDE)
COMMANDS = [shlex.split(line)[2:] for line in LINES if line.startswith(SCRIPT)]


def test_no_command_is_left_out():
    servers = [line for line in LINES if line.startswith(SERVER)]
    assert len(COMMANDS) + len(servers) == len(LINES)
    assert len(COMMANDS) > 5 and len(servers) == 1


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_command_is_a_configuration_that_works(arguments):
    config = load_config(composed("grpo", *arguments))
    assert config != load_config(composed("grpo")) or arguments == []


def test_the_servers_command_is_understood():
    line, = (line for line in LINES if line.startswith(SERVER))
    args = parser().parse_args(shlex.split(line)[3:])
    check(args)
    assert (args.port, args.max_model_len) == (9001, 2048)
    for option in re.findall(r"`(--[a-z-]+)`", GUIDE):
        assert f"'{option}'" in str(parser()._option_string_actions.keys()), option


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize("arguments", [given for given in COMMANDS
                                       if not any("url=" in part for part in given)],
                         ids=" ".join)
def test_command_runs(arguments, tmp_path, cache, model_folder):
    """The one that names a server is run by the tests of the arrangements, with a server."""
    pytest.importorskip("vllm")
    if any("quantization" in part for part in arguments):
        pytest.importorskip("torchao")
    # Each update of this way starts a server, which takes a minute: one iteration for it.
    fewer = ["train.total_dialog_turns=4"] * ("inference_model.weight_sync=restart" in arguments)
    output = finished([sys.executable, REPO / SCRIPT.split()[1], *arguments, *SMALLER, *fewer],
                      tmp_path, environment(cache))
    assert "held-out accuracy" in output


def test_programs_run(model_folder, tmp_path, monkeypatch, tokenizer):
    pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    monkeypatch.chdir(tmp_path)
    model = make_lora(AutoModelForCausalLM.from_pretrained(model_folder))
    save_trained(model, tokenizer, tmp_path / "path" / "to" / "run", prefix="final_")
    assert len(blocks("python", GUIDE)) == 2
    for source in blocks("python", GUIDE):
        source = source.replace("Qwen/Qwen2.5-0.5B-Instruct", str(model_folder))
        exec(compile(source, "page", "exec"), {"__name__": "page"})


def test_every_engine_and_way_has_a_row():
    rows = table_rows(GUIDE, "2 Arrangements and ways")
    names = [name for row in rows for name in code_in(row[0])]
    assert set(names) >= {*get_args(EngineKind), *get_args(Sync)}


@pytest.mark.parametrize(("page", "least"), [(GUIDE, 12), (OBJECTIVES, 40)],
                         ids=["weights", "objectives"])
def test_every_configuration_key_of_a_guide_exists(page, least):
    key = rf"(?<![\w./-])((?:{'|'.join(SECTIONS)})\.[a-z_][a-z0-9_.]*(?<!\.))(?![\w(])"
    keys = {name for text in code_in(page) for name in re.findall(key, text)} - {"train.yaml"}
    assert len(keys) > least
    for name in keys:
        section = Config
        for part in name.split("."):
            assert part in section.model_fields, name
            section = section.model_fields[part].annotation


@pytest.mark.parametrize(("given", "message"), [
    (code_in(row[0])[0], code_in(row[1])[0])
    for row in (*table_rows(GUIDE, "8 Errors and their fix"),
                *table_rows(OBJECTIVES, "14 Errors and their fix"))
    if len(row) == 3 and "=" in row[0]])
def test_configuration_error_of_a_guide_is_raised_with_its_message(given, message):
    values = composed("grpo", *shlex.split(given))
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_config(values)
