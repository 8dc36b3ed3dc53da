"""Problems that are held out where nothing says how many, by the recipes as they are."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from grpo.envs.tasks import verifiers
from grpo.run.build import build_task

from ..config.configs import composed_like


@pytest.fixture
def package(monkeypatch):
    """Stands for verifiers, whose environments have so many problems."""
    def load_environment(name, *, train, test=None):
        rows = {split: [{"prompt": [{"role": "user", "content": f"{split} {n}?"}], "answer": str(n)}
                        for n in range(count or 0)]
                for split, count in (("train", train), ("test", test))}
        return SimpleNamespace(
            get_dataset=lambda: rows["train"], get_eval_dataset=lambda: rows["test"],
            build_eval_dataset=lambda: None, eval_dataset=rows["test"] if test else None,
            rubric=SimpleNamespace(has_group_rewards=False, funcs=[]), tool_defs=None,
            _normalize_tool_defs=lambda tools: tools)

    names = ("verifiers", "verifiers.envs", "verifiers.envs.environment")
    package, envs, environment = map(ModuleType, names)
    package.load_environment, envs.environment, environment.signal = (
        load_environment, environment, SimpleNamespace())
    for name, module in zip(names, (package, envs, environment), strict=True):
        monkeypatch.setitem(sys.modules, name, module)
    verifiers._load.cache_clear()
    yield
    verifiers._load.cache_clear()


@pytest.mark.parametrize(("args", "counts"), [
    ("train: 100", (90, 10)), ("train: 4", (3, 1)), ("train: 1600", (1500, 100)),
    ("train: 400, test: 30", (400, 30)), ("train: 10, test: 150", (10, 100))])
def test_an_environment_of_verifiers_may_have_few_problems(package, args, counts):
    """An evaluation set, or a tenth, and in either case no more than 100."""
    task = build_task(composed_like(
        ["env=verifiers", "env.id=sums", f"env.task.args={{{args}}}"]))
    assert (len(task.train), len(task.test)) == counts
    assert not {problem.prompt[0]["content"] for problem in task.train} & {
        problem.prompt[0]["content"] for problem in task.test}


def test_more_than_there_are_is_refused_where_it_is_typed(package):
    config = composed_like(["env=verifiers", "env.id=sums", "env.task.num_test=100",
                            "env.task.args={train: 400, test: 30}"])
    with pytest.raises(ValueError, match="env.task.num_test=100: env.id=sums has only 30"):
        build_task(config)


@pytest.mark.parametrize(("train", "test", "counts"), [
    (60, 7, (60, 7)), (60, 0, (54, 6)), (5, 0, (4, 1)), (256, 0, (231, 25))])
def test_an_environment_of_torchrl_may_have_few_problems(
        gsm8k_rows, tmp_path, train, test, counts):
    for split, count in (("train", train), ("test", test)):
        if count:
            lines = (gsm8k_rows / f"{split}.jsonl").read_text().splitlines()[:count]
            (tmp_path / f"{split}.jsonl").write_text("\n".join(lines))
    task = build_task(composed_like(
        ["env=chat_env", "env.id=GSM8KEnv", f"env.data_path={tmp_path}"]))
    assert (len(task.train), len(task.test)) == counts
