"""The example environments, unmodified, in their own interpreter, against atroposlib's run-api.

The interpreter is ``$GRPO_ATROPOS_PYTHON`` or that of ``.venv-atropos`` (``make atropos-env``).
"""

from __future__ import annotations

import json
import os
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from grpo.atropos.client import AtroposClient, AtroposError
from grpo.atropos.hub_server import HubServer
from grpo.atropos.launcher import EnvironmentProcess, serve_flags
from grpo.envs.tasks import ArithmeticTask
from grpo.envs.tokenizer_files import environment_tokenizer, save_tokenizer
from grpo.system.child_process import Child, log_tail

from ..support import finished, free_port, wait_until
from .groups import registration
from .inference import LOG_PROB, inference_server

pytestmark = pytest.mark.slow  # atroposlib takes seconds to import, an environment ten to start

REPO = Path(__file__).resolve().parents[2]
EXAMPLES = REPO / "examples" / "atropos"
NAMES = ("arithmetic", "two_turn", "chat", "gsm8k")
GROUP = 4
EOS = 1
TRAINER = registration(batch_size=GROUP, max_token_len=1024, checkpoint_dir="",
                       save_checkpoint_interval=-1, num_steps=1000)


@pytest.fixture(scope="module")
def tokenizer_folder(tokenizer, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(tokenizer, folder)
    return folder


def batch(url: str) -> list[dict] | None:
    """A batch as run-api sends it."""
    return AtroposClient(url).call("GET", "/batch")["batch"]


@contextmanager
def run_api(python: Path, log_path: Path, port: int | None = None):
    """atroposlib's API server; its address."""
    port = port or free_port()
    url = f"http://127.0.0.1:{port}"
    child = Child([str(python), "-m", "atroposlib.cli.run_api", "--host", "127.0.0.1",
                   "--port", str(port)], log_path=log_path)
    try:
        wait_until(AtroposClient(url).alive, seconds=60.0, said=lambda: log_tail(log_path))
        yield url
    finally:
        child.stop()


def register(url: str) -> None:
    """Be a trainer: register and ask once, which lets environments in."""
    AtroposClient(url).register(TRAINER)
    batch(url)


def next_group(url: str, *, processes=(), timeout: float = 60.0) -> dict:
    return wait_until(lambda: batch(url), seconds=timeout, said=lambda: "".join(
        log_tail(process.log_path, 15) for process in processes))[0]


def wait_for_environment(url: str, process: EnvironmentProcess) -> None:
    """Wait until run-api knows an environment. It fails the question as long as it does not."""
    def known() -> bool:
        try:
            return bool(AtroposClient(url).status_env(0))
        except AtroposError:
            return False

    wait_until(known, seconds=60.0, said=lambda: log_tail(process.log_path))


def example(name: str, engine_url: str, tokenizer: Path, *, token: str | None = None,
            env: dict[str, Any], **options) -> EnvironmentProcess:
    """An example environment for an engine; ``env`` are fields of its configuration."""
    flags = serve_flags(engine_url=engine_url, model="tiny", tokenizer=tokenizer, token=token,
                        group_size=GROUP, **env)
    return EnvironmentProcess(EXAMPLES / f"{name}_env.py", flags=flags,
                              env={"HF_HUB_OFFLINE": "1"}, **options)


def a_group_of_each(python: Path, engine_url: str, tokenizer: Path, folder: Path, *,
                    data_path: Path, scores_differ: bool, token: str | None = None,
                    **env) -> dict[str, dict]:
    """One group of each environment. Each has its own API, all run at the same time."""
    with ExitStack() as stack:
        urls, processes = {}, []
        for name in NAMES:
            url = urls[name] = stack.enter_context(run_api(python, folder / f"{name}_api.log"))
            of_files = {"data_path": data_path} if name == "gsm8k" else {}
            processes.append(stack.enter_context(example(
                name, engine_url, tokenizer, token=token, python=python, api_url=url,
                log_path=folder / f"{name}.log", env={
                    "ensure_scores_are_not_same": scores_differ and not of_files,
                    **of_files, **env})))
            register(url)
        return {name: next_group(url, processes=processes, timeout=120.0)
                for name, url in urls.items()}


@pytest.fixture(scope="module")
def groups(python, tokenizer, tokenizer_folder, tmp_path_factory) -> dict[str, dict]:
    folder = tmp_path_factory.mktemp("environments")
    for split in ("train", "test"):
        rows = [{"question": f"What is {a}+{a}=", "answer": f"add\n#### {2 * a:02d}"}
                for a in range(10, 15)]
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with inference_server(tokenizer) as (engine, _):
        return a_group_of_each(python, engine, tokenizer_folder, folder, data_path=folder,
                               scores_differ=True)


@pytest.mark.parametrize("name", NAMES)
def test_a_group_has_masked_prompts_and_the_tokens_of_the_replies(groups, name):
    group = groups[name]
    assert len(group["tokens"]) == len(group["masks"]) == len(group["scores"]) == GROUP
    for tokens, mask in zip(group["tokens"], group["masks"], strict=True):
        assert len(tokens) == len(mask) and mask[0] == -100
        assert all(m in (-100, token) for m, token in zip(mask, tokens, strict=True))
        assert any(m != -100 for m in mask)


@pytest.mark.parametrize("name", ["arithmetic", "two_turn", "gsm8k"])
def test_log_probs_are_the_engines_on_trained_tokens_and_one_elsewhere(groups, name):
    group = groups[name]
    for mask, log_probs in zip(group["masks"], group["inference_logprobs"], strict=True):
        assert log_probs == [1.0 if m == -100 else LOG_PROB for m in mask]


def text_of(tokenizer, tokens):
    return tokenizer.decode([token for token in tokens if token != -100])


def test_arithmetic_asks_training_problems_in_the_tasks_own_form(groups, tokenizer):
    group, task = groups["arithmetic"], ArithmeticTask()
    answers = {problem.prompt: problem.answer for problem in task.train}
    texts = [text_of(tokenizer, tokens) for tokens in group["tokens"]]
    (prompt,) = {text.split("=")[0] + "=" for text in texts}
    # The trainer's task leaves out the last few problems that are not needed.
    assert prompt in answers or prompt not in {problem.prompt for problem in task.test}
    a, b = map(int, prompt.rstrip("=").split("+"))
    right = f"{prompt}{a + b:02d}<eos>"
    assert group["scores"] == [float(text == right) for text in texts]
    assert sorted(group["scores"]) == [0.0, 0.0, 1.0, 1.0]
    assert group["generation_params"] == {"temperature": 1.0}


def test_two_turns_are_one_sequence_with_both_replies_trained(groups, tokenizer):
    for tokens, mask in zip(groups["two_turn"]["tokens"], groups["two_turn"]["masks"],
                            strict=True):
        trained = text_of(tokenizer, mask)
        text = text_of(tokenizer, tokens)
        assert trained.count("<eos>") == 2 and text.count("assistant: ") == 2
        first, second, _ = trained.split("<eos>")
        assert f"assistant: {first}<eos>\nuser: " in text
        assert text.endswith(f"assistant: {second}<eos>")
        assert ("Right." in text) != ("Wrong." in text)


def test_chat_sends_no_log_probs_and_tokenizes_the_text_again(groups, tokenizer):
    group = groups["chat"]
    assert group["inference_logprobs"] is None
    for tokens, mask in zip(group["tokens"], group["masks"], strict=True):
        assert text_of(tokenizer, tokens).endswith("assistant: " + text_of(tokenizer, mask))


def test_gsm8k_asks_the_questions_of_the_files_by_the_chat_template(groups, tokenizer):
    text = text_of(tokenizer, groups["gsm8k"]["tokens"][0])
    assert text.startswith("system: Solve the problem step by step.")
    assert "user: What is 1" in text and text.endswith("<eos>")
    assert set(groups["gsm8k"]["scores"]) == {0.0}  # no answer block


def in_environment(python: Path, code: str):
    """The value that ``code`` prints as JSON, run beside the examples."""
    printed = finished([python, "-c", code], EXAMPLES, os.environ | {"HF_HUB_OFFLINE": "1"})
    return json.loads(printed.splitlines()[-1])


@pytest.mark.parametrize(("max_operand", "seed", "num_test"), [(49, 0, 256), (9, 3, 15)])
def test_the_split_is_that_of_the_trainers_task(python, max_operand, seed, num_test):
    train, test = in_environment(python, f"""
import json, arithmetic_env
print(json.dumps(arithmetic_env.additions({max_operand=}, {seed=}, {num_test=})))""")
    task = ArithmeticTask(max_operand=max_operand, seed=seed, num_test=num_test,
                          num_train=len(train))
    assert test == [] or {tuple(p) for p in test} == {(p.prompt, p.answer) for p in task.test}
    assert {tuple(p) for p in train} == {(p.prompt, p.answer) for p in task.train}


def test_gsm8k_reads_and_grades_the_real_files_as_the_trainer_does(python, gsm8k_folder):
    from grpo.envs.rewards.answers import gsm8k
    from grpo.envs.tasks import Gsm8kTask

    task = Gsm8kTask(data_path=gsm8k_folder, num_train=0)
    texts = ["18", "<answer>18</answer>", "<answer> $18.00 </answer>", "<answer></answer>",
             "<answer>18", "a<answer>1,8</answer><answer>9</answer>", "<answer>17.</answer>"]
    problems, grades = in_environment(python, f"""
import json, pathlib, gsm8k_env
problems = gsm8k_env.read_problems(pathlib.Path({str(gsm8k_folder)!r}, "test.jsonl"))
grades = [gsm8k_env.grade(text, problems[0][1]) for text in {texts!r}]
print(json.dumps([problems, grades]))""")
    assert [q for q, _ in problems] == [p.prompt[-1]["content"] for p in task.test]
    assert [a.replace(",", "") for _, a in problems] == [p.answer.replace(",", "")
                                                         for p in task.test]
    assert grades == [gsm8k(text, task.test[0]).reward for text in texts]


def test_a_missing_data_folder_is_named_before_anything_is_asked(python, tokenizer_folder,
                                                                 tmp_path):
    with run_api(python, tmp_path / "api.log") as url:
        register(url)
        with example("gsm8k", "http://127.0.0.1:9", tokenizer_folder, python=python, api_url=url,
                     max_restarts=0, log_path=tmp_path / "env.log",
                     env={"data_path": tmp_path / "nowhere"}) as process:
            wait_until(lambda: process.state == "failed", seconds=60.0)
        assert any("nowhere/train.jsonl is not there" in line for line in process.last_lines())


def test_the_order_of_starts_is_free_and_the_api_may_restart(python, tokenizer, tokenizer_folder,
                                                             tmp_path):
    """Environment first, then API and trainer, then the engine; then the API comes again."""
    port, engine_port = free_port(), free_port()
    with ExitStack() as stack:
        process = stack.enter_context(example(
            "arithmetic", f"http://127.0.0.1:{engine_port}", tokenizer_folder, python=python,
            api_url=f"http://127.0.0.1:{port}", log_path=tmp_path / "env.log", max_restarts=2,
            env={}))
        for first in (True, False):
            with run_api(python, tmp_path / "api.log", port) as url:
                register(url)
                if first:
                    wait_for_environment(url, process)
                    time.sleep(7)  # it begins to ask after 5
                    assert batch(url) is None
                    stack.enter_context(inference_server(tokenizer, engine_port))
                assert len(next_group(url, processes=[process])["tokens"]) == GROUP
            process.check()


def test_a_hub_with_a_token_in_the_place_of_run_api(python, tokenizer, tokenizer_folder, tmp_path):
    with HubServer(token="secret") as hub, inference_server(tokenizer) as (engine, _):
        trainer = AtroposClient(hub.url, token="secret")
        with example("arithmetic", engine, tokenizer_folder, python=python, api_url=hub.url,
                     api_token="secret", log_path=tmp_path / "env.log", env={}) as process:
            assert not process.registered()
            trainer.register(TRAINER)
            trainer.batch()
            process.wait_registered(timeout=60)
            found = wait_until(trainer.batch, seconds=60.0,
                               said=lambda: log_tail(process.log_path))
            process.check()
    assert list(map(len, found.groups)) == [GROUP] and not found.rejected


def test_groups_are_written_by_process_without_an_api(python, tokenizer, tokenizer_folder,
                                                      tmp_path):
    with inference_server(tokenizer) as (engine, requests):
        flags = serve_flags(engine_url=engine, model="tiny", tokenizer=tokenizer_folder,
                            group_size=GROUP, total_steps=2, ensure_scores_are_not_same=False,
                            data_path_to_save_groups=tmp_path / "groups.jsonl")
        command = [python, EXAMPLES / "arithmetic_env.py", "process",
                   *(f"--{name}={value}" for name, value in flags.items())]
        finished(command, tmp_path, os.environ | {"HF_HUB_OFFLINE": "1"})
    rows = [json.loads(line) for line in (tmp_path / "groups.jsonl").read_text().splitlines()]
    assert len(rows) == 2 and all(len(row["tokens"]) == GROUP for row in rows)
    assert {path for path, _ in requests} >= {"/generate"}


def test_a_tokenizer_of_transformers_5_is_the_same_in_the_environment(python, model_folder,
                                                                     tokenizer, tmp_path):
    folder = environment_tokenizer(model_folder, tmp_path)
    text, chat = "user: 07+35= é\n", [{"role": "user", "content": "hi"}]
    ids, rendered, decoded, eos = in_environment(python, f"""
import json
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained({str(folder)!r})
print(json.dumps([tokenizer({text!r})["input_ids"],
                  tokenizer.apply_chat_template({chat!r}, add_generation_prompt=True),
                  tokenizer.decode(tokenizer({text!r})["input_ids"]), tokenizer.eos_token_id]))""")
    assert ids == tokenizer(text)["input_ids"] and decoded == text and eos == EOS
    assert rendered == tokenizer("user: hi\nassistant: ")["input_ids"]


@pytest.fixture(scope="module")
def sharp_model(model_folder, tmp_path_factory) -> Path:
    """A random model whose log-probs differ from token to token."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(model_folder)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "norm" not in name:
                param.normal_(std=0.2, generator=torch.Generator().manual_seed(len(name)))
    folder = tmp_path_factory.mktemp("sharp")
    model.save_pretrained(folder)
    save_tokenizer(AutoTokenizer.from_pretrained(model_folder), folder)
    return folder


@pytest.mark.vllm
def test_all_environments_sample_from_a_real_engine(python, sharp_model, gsm8k_folder, tmp_path):
    pytest.importorskip("vllm")
    import torch
    from transformers import AutoModelForCausalLM

    from grpo.server.engine_process import EngineProcess, server_command

    command = server_command(str(sharp_model), dtype="float32", max_model_len=1536, token="secret",
                             served_model_name="tiny", kv_cache_memory_bytes=64 << 20)
    with EngineProcess(command, start_timeout=240) as engine:
        groups = a_group_of_each(python, engine.url, sharp_model, tmp_path, data_path=gsm8k_folder,
                                 scores_differ=False, token="secret", max_new_tokens=12)
    model = AutoModelForCausalLM.from_pretrained(sharp_model)
    assert groups.pop("chat")["inference_logprobs"] is None
    for group in groups.values():
        assert len({tuple(tokens) for tokens in group["tokens"]}) > 1
        for tokens, mask, sent in zip(*(group[key] for key in ("tokens", "masks",
                                                               "inference_logprobs")),
                                      strict=True):
            with torch.no_grad():
                logits = model(torch.tensor([tokens])).logits[0, :-1]
            ours = logits.log_softmax(-1).gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0]
            trained = torch.tensor(mask[1:]) != -100
            torch.testing.assert_close(torch.tensor(sent[1:])[trained], ours[trained],
                                       atol=1e-4, rtol=0)
