"""From the configuration to evaluations: of the run's own task, of samples, of benchmarks."""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from grpo.config.evaluation import LM_EVAL
from grpo.config.recipes import env_recipe
from grpo.config.schema import Config, ConfigError
from grpo.envs.dialog import environment, named_step
from grpo.envs.prompts import Prompt, digest, question
from grpo.envs.tasks import Problem, Task
from grpo.envs.verifiable import VerifiableEnv
from grpo.policies.base import Policy
from grpo.policies.fleet import FleetPolicy
from grpo.run import build
from grpo.training.evaluation import Evaluator
from grpo.training.evaluations import Evaluations, Sampler, TaskEvaluator
from grpo.training.harness import HarnessTask

logger = logging.getLogger(__name__)

#: See :func:`questions`.
Questions = frozenset[tuple[str, ...]]


@dataclass(frozen=True)
class HeldOut:
    """The held-out problems of a task, rendered."""

    name: str
    config: Config  # whose section ``env`` is the task's
    task: Task
    prompts: list[Prompt]
    width: int  # tokens of the longest prompt
    max_tokens: int  # of a response
    tokenizer: Any  # with the chat template that rendered them

    @property
    def length(self) -> int:
        """Tokens of the longest prompt and response."""
        return self.width + self.max_tokens

    @property
    def described(self) -> str:
        """For the screen."""
        return (f"{self.name}: {len(self.prompts):,} held-out problems, completions of at most "
                f"{self.max_tokens:,} tokens")


def held_out(
    name: str, config: Config, tokenizer: Any, *, max_tokens: int, limit: int,
    task: Task | None = None, trained: Questions = frozenset(),
) -> HeldOut:
    """Render the held-out problems of a task.

    Args:
        name: under which results are kept.
        config: whose section ``env`` is the task's.
        max_tokens: of a response.
        limit: tokens of prompt and response; longer prompts are skipped and counted.
        task: if it has been built.
        trained: what the model was trained on, which is left out, counted and logged.

    Raises:
        ConfigError: where no prompt fits, all were trained on, or a conversation has nobody who
            answers.
    """
    task, room = task or build.build_task(config), limit - max_tokens
    if room < 1:
        raise ConfigError(f"{name}: {max_tokens} tokens of a response leave no room for a prompt "
                          f"in {limit}; lower inference_model.max_tokens or "
                          "eval.benchmark_max_tokens, or raise inference_model.max_model_len")
    problems = task.split("test")
    if (config.env.step is not None and named_step(config.env.step) is environment
            and problems[0].partner is None):
        raise ConfigError(f"env.step=environment: the problems of {task.name} have nobody who "
                          "answers the model; use another step")
    prompts = build.rendered(config, task, "test", tokenizer,
                             max_prompt_tokens=min(room, config.env.max_prompt_tokens or room))
    kept = [prompt for prompt in prompts if question(prompt.problem) not in trained]
    if some := len(prompts) - len(kept):
        message = f"{name}: {some} of {len(prompts)} problems are among the run's training prompts"
        if not kept:
            raise ConfigError(f"{message}; nothing is left, choose other options of env, such as "
                              "another seed, or another benchmark")
        logger.warning("%s; they are left out", message)
        prompts = kept
    return HeldOut(name, config, task, prompts, max(len(prompt.tokens) for prompt in prompts),
                   max_tokens, tokenizer)


def questions(problems: Iterable[Problem]) -> Questions:
    """What a run trains on. Conversations that begin alike and are about the same, as far as their
    data says, cannot be told apart: they are not in it, which is logged."""
    times = Counter[tuple[str, ...]]()
    partners = set[tuple[str, ...]]()
    for problem in problems:
        times[asked := question(problem)] += 1
        if problem.partner is not None:
            partners.add(asked)
    alike = {asked for asked in partners if times[asked] > 1}
    if alike:
        logger.warning("%d training conversations cannot be told from one another by what they "
                       "begin with; whether held-out ones are among them is not known",
                       sum(times[asked] for asked in alike))
    return frozenset(times.keys() - alike)


def build_benchmarks(
    config: Config, tokenizer: Any, *, limit: int, trained: Questions = frozenset()
) -> list[HeldOut | HarnessTask]:
    """The held-out problems of ``eval.benchmarks``, see :func:`held_out`, and tasks of lm-eval.

    Each gets a copy of the tokenizer, because a chat template stays with it.
    """
    tokens = config.eval.benchmark_max_tokens or config.max_tokens

    def build_one(name: str) -> HeldOut | HarnessTask:
        if name.startswith(LM_EVAL):
            return HarnessTask.named(
                name, config.eval.lm_eval_options(name), copy.copy(tokenizer), limit=limit,
                folder=config.eval.lm_eval_path, max_tokens=config.eval.benchmark_max_tokens)
        env = env_recipe(name, config.eval.changes(name), key="eval.benchmarks")
        return held_out(name, config.model_copy(update={"env": env}), copy.copy(tokenizer),
                        max_tokens=tokens, limit=limit, trained=trained)

    return [build_one(name) for name in config.eval.benchmarks or ()]


def build_evaluations(
    config: Config, tasks: Sequence[HeldOut | HarnessTask], policy: Policy, *, rows: int
) -> Evaluations:
    """What a run evaluates: its own task, which is the first, and benchmarks; for ``rows`` see
    :func:`task_evaluator`."""
    harness = [one.evaluator(policy, rows=rows, seed=config.eval.seed)
               for one in tasks if not isinstance(one, HeldOut)]
    tasks = [one for one in tasks if isinstance(one, HeldOut)]
    names = [one.name if one is tasks[0] or one.name != tasks[0].name else f"{one.name}_2"
             for one in tasks]  # a benchmark may be of the run's own kind, with other options
    own, *benchmarks = (task_evaluator(replace(one, name=name), policy, rows=rows)
                        for name, one in zip(names, tasks, strict=True))
    return Evaluations(own, benchmarks, harness=harness, ks=config.eval.ks, seed=config.eval.seed,
                       at_checkpoints=config.eval.at_checkpoints, model=config.model.name)


def task_evaluator(problems: HeldOut, policy: Policy, *, rows: int) -> TaskEvaluator:
    """The evaluation of a task, ``rows`` completions at a time: greedy, and the samples that
    ``eval.samples`` asks for."""
    config, options, tokenizer = problems.config, problems.config.eval, problems.tokenizer
    policy = policy.with_sampling(max_tokens=problems.max_tokens)

    def make_env(num_prompts: int, group_size: int) -> VerifiableEnv:
        score = build.reward_function(config, problems.task)
        return VerifiableEnv(
            problems.prompts, score, tokenizer, num_prompts=num_prompts, group_size=group_size,
            shuffle=False, max_prompt_tokens=problems.width,
            max_response_tokens=problems.max_tokens, eos_token_ids=policy.eos_token_ids,
            dialog=build.build_dialog(config, score, tokenizer, policy))

    count, errors = len(problems.prompts), config.env.max_reward_errors
    greedy = Evaluator(make_env(min(count, rows), 1), policy, max_reward_errors=errors)
    asked = {"env": config.env.model_dump(mode="json"), "max_tokens": problems.max_tokens,
             "reward": config.env.weighted_rewards(problems.task.default_reward),
             "hashes": [digest(prompt.problem) for prompt in problems.prompts]}
    if options.samples is None:
        return TaskEvaluator(problems.name, greedy, asked=asked)
    batches = -(-count // max(1, rows // options.samples))  # of one size, for less in vain
    return TaskEvaluator(problems.name, greedy, Sampler(
        make_env(-(-count // batches), options.samples), policy, seed=options.seed,
        temperature=options.temperature,
        seeds_rows=config.engine != "in_process" or isinstance(policy, FleetPolicy),
        max_reward_errors=errors), asked | {"temperature": options.temperature})
