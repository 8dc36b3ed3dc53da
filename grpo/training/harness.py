"""Tasks of lm-eval by name, asked of a policy.

`lm-eval <https://github.com/EleutherAI/lm-evaluation-harness>`_ has the tasks, their prompts,
filters and metrics; here is its model: what it wants generated or scored, a policy does, with the
weights as they are.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from functools import cached_property
from io import StringIO
from typing import Any
from unittest import mock

from grpo import data
from grpo.config.evaluation import LM_EVAL, LM_EVAL_PACKAGE, LmEvalOptions
from grpo.config.keys import ConfigError
from grpo.policies.base import Policy

logger = logging.getLogger(__name__)

#: Tokens of the first round of generating: a row that has its stop text by then is not continued.
_ROUND = 64
#: Draws for the standard errors of metrics that are no means, such as BLEU.
_RESAMPLES = 1000
#: The seed of lm-eval's own command for examples in prompts.
_FEWSHOT_SEED = 1234
#: What changes nothing, whatever engine generates.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (None, 1, 1.0), "top_k": (None, 0, -1), "min_p": (None, 0, 0.0),
    "num_beams": (None, 1), "repetition_penalty": (None, 1, 1.0), "length_penalty": (None, 1, 1.0),
    "use_cache": (None, True, False), "seed": (None,), "num_return_sequences": (None, 1)}
_SAMPLERS = ("top_p", "top_k", "min_p")  # which greedy decoding does not read


class PolicyLM:
    """A policy as a model of lm-eval, with what ``lm_eval.evaluator.evaluate`` asks of one.

    Args:
        policy: what generates and scores.
        tokenizer: of its model.
        rows: completions at a time.
        max_tokens: of an answer, where a task does not say.
        seed: of what a task wants sampled.
    """

    rank, world_size = 0, 1

    def __init__(self, policy: Policy | None, tokenizer: Any, *, rows: int = 1,
                 max_tokens: int = 256, seed: int = 0) -> None:
        self.policy, self.tokenizer, self.rows = policy, tokenizer, rows
        self.max_tokens, self.seed, self.calls = max_tokens, seed, 0
        # An engine that scores a prompt samples one token behind it.
        self.max_length = 2**31 if policy is None else policy.max_model_len - 1

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text that has nothing before it."""
        bos = self.tokenizer.bos_token_id
        return self.tokenizer.eos_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        return self.tokenizer.apply_chat_template(
            chat_history, tokenize=False, add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt)

    def encode(self, text: str) -> list[int]:
        """Token ids, with what the tokenizer puts before a text that does not have it."""
        bos = self.tokenizer.bos_token
        return self.tokenizer.encode(
            text, add_special_tokens=not (bos and text.startswith(bos)))

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        return self._scored([self.pair(*request.args) for request in requests])

    def pair(self, context: str, answer: str) -> tuple[list[int], list[int]]:
        """Tokens of both, cut where the context's own tokens end; spaces between them belong to
        the answer, as words begin with theirs."""
        if not context:
            tokens = self.tokenizer.encode(answer, add_special_tokens=False)
            has_prefix = tokens[:1] == [self.prefix_token_id]
            return [self.prefix_token_id], tokens[1:] if has_prefix else tokens
        before = context.rstrip()
        if not before:
            before = context
        size = len(self.encode(before))
        whole = self.encode(context + answer)
        return whole[:size], whole[size:]

    def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
        from lm_eval import utils

        windows, owners = [], []
        for number, request in enumerate(requests):
            found = [*map(utils.make_disjoint_window, utils.get_rolling_token_windows(
                token_list=self.encode(request.args[0]), prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length, context_len=1))]
            windows += found
            owners += [number] * len(found)
        sums = [0.0] * len(requests)
        for number, (value, _) in zip(owners, self._scored(windows), strict=True):
            sums[number] += value
        return sums

    def _parts(self, of: list[Any]) -> Iterator[list[Any]]:
        """As many at a time as the engine takes."""
        return (of[first:first + self.rows] for first in range(0, len(of), self.rows))

    def _scored(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """Rows that are too long lose the beginning of their context, as in lm-eval."""
        rows = [(list(context)[-max(1, self.max_length - len(answer)):], list(answer))
                for context, answer in pairs]
        return [score for part in self._parts(rows) for score in self.policy.score(part)]

    def generate_until(self, requests: list[Any]) -> list[str]:
        answers: list[str] = [""] * len(requests)
        alike: dict[tuple[float, int], list[int]] = {}
        wanted = [self.wanted(request) for request in requests]
        for number, (_, limit, temperature, _) in enumerate(wanted):
            alike.setdefault((temperature, limit), []).append(number)
        for (temperature, limit), numbers in alike.items():
            for part in self._parts(numbers):
                texts = self._generated([wanted[number][0][-(self.max_length - limit):]
                                         for number in part],
                                        [wanted[number][3] for number in part], limit, temperature)
                for number, text in zip(part, texts, strict=True):
                    answers[number] = text
        return answers

    def wanted(self, request: Any) -> tuple[list[int], int, float, list[str]]:
        """Of a request the prompt, the most tokens of an answer, temperature and stop texts.

        Raises:
            ConfigError: for a way to sample that no policy has.
        """
        from lm_eval.models.utils import normalize_gen_kwargs

        context, options = request.args
        options = dict(normalize_gen_kwargs(options, default_max_gen_toks=self.max_tokens))
        limit, stops = options.pop("max_gen_toks"), options.pop("until")
        sampled, temperature = options.pop("do_sample"), options.pop("temperature", 0.0)
        temperature = float(temperature or 1.0) if sampled else 0.0
        for name, value in options.items():
            if value not in _NEUTRAL.get(name, ()) and (sampled or name not in _SAMPLERS):
                raise ConfigError(f"{LM_EVAL}{request.task_name} generates with {name}={value}, "
                                  "which the engine here does not have; take it out of the task's "
                                  "generation_kwargs, in a copy in eval.lm_eval_path")
        return self.encode(context), limit, temperature, stops

    def _generated(self, prompts: list[list[int]], stops: list[list[str]], limit: int,
                   temperature: float) -> list[str]:
        """Answers up to their stop texts, in rounds that double: policies know end tokens alone."""
        tokens: list[list[int]] = [[] for _ in prompts]
        texts, going, done = [""] * len(prompts), [*range(len(prompts))], 0
        while going:
            step = min(max(_ROUND, done), limit - done)
            policy = self.policy.with_sampling(temperature=temperature, max_tokens=step,
                                               seed=self.seed)
            policy.calls, self.calls = self.calls, self.calls + 1
            if temperature and hasattr(policy, "seeded"):
                policy.seeded = True
            batch = policy.generate_from_ids([prompts[row] + tokens[row] for row in going])
            sizes = batch[data.ASSISTANT_MASK].sum(-1).tolist()
            said = batch[data.RESPONSE_TOKENS].tolist()
            ended = (batch[data.FINISH_REASON] == data.FINISH_STOP).tolist()
            done += step
            for row, new, size in zip(going, said, sizes, strict=True):
                tokens[row] += new[:size]
                texts[row] = self.tokenizer.decode(tokens[row], skip_special_tokens=True)
            going = [row for row, end in zip(going, ended, strict=True)
                     if not end and done < limit and not any(
                         stop and stop in texts[row] for stop in stops[row])]
        return [_before(text, ends) for text, ends in zip(texts, stops, strict=True)]


def _before(text: str, stops: Sequence[str]) -> str:
    """A text up to the first of its stops.

    Examples:
        >>> _before("4. Q: 5", ["Q:", "."])
        '4'
    """
    for stop in stops:
        text = text.split(stop)[0] if stop else text
    return text


@dataclass(frozen=True)
class HarnessTask:
    """A task or group of lm-eval, with what it will ask.

    Args:
        name: ``lm_eval:TASK``.
        loaded: from lm-eval's ``TaskManager``.
        options: how it is asked.
        tokenizer: of the model.
        max_tokens: of an answer, where the task does not say; None: lm-eval's 256.
        limit: tokens that the model reads at most.
    """

    name: str
    loaded: dict[str, Any]
    options: LmEvalOptions
    tokenizer: Any
    max_tokens: int | None
    limit: int

    @classmethod
    def named(cls, name: str, options: LmEvalOptions, tokenizer: Any, *, folder: str | None,
              max_tokens: int | None, limit: int) -> HarnessTask:
        """Load a task.

        Raises:
            ConfigError: without the package, if there is none of the name, its data cannot be had,
                or it runs code.
        """
        try:
            from lm_eval.tasks import TaskManager
        except ImportError as error:
            raise ConfigError(f"eval.benchmarks: {name} needs lm-eval ({error}); pip install "
                              f"'{LM_EVAL_PACKAGE}', or the extra lm-eval of this package"
                              ) from error
        with _quiet():
            manager = TaskManager(include_path=folder)
        known = name.removeprefix(LM_EVAL)
        if known not in manager.all_tasks:
            near = [task for task in manager.all_tasks if known.split("_")[0] in task][:8]
            raise ConfigError(f"eval.benchmarks: lm-eval has no task {known!r}; "
                              + (f"similar ones are {', '.join(near)}" if near else
                                 "eval.lm_eval_path names a folder with tasks of your own"))
        try:
            with _quiet():
                loaded = manager.load([known])
        except Exception as error:  # noqa: BLE001  of data sets, hubs and files of any kind
            raise ConfigError(f"eval.benchmarks: {name} cannot be loaded ({type(error).__name__}: "
                              f"{error}); its data must be here or on a hub that can be reached"
                              ) from error
        for task in loaded["tasks"].values():
            if getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False):
                raise ConfigError(f"eval.benchmarks: {name} runs what the model writes, or shows "
                                  "it images; that is not done here, use lm-eval's own command")
            if options.num_fewshot is not None and task.get_config("num_fewshot") != 0:
                task.set_config(key="num_fewshot", value=options.num_fewshot)
            elif task.get_config("num_fewshot") is None:
                task.set_config(key="num_fewshot", value=0)
        return cls(name, loaded, options, tokenizer, max_tokens, limit)

    def _model(self, policy: Policy | None, **options: Any) -> PolicyLM:
        return PolicyLM(policy, self.tokenizer, max_tokens=self.max_tokens or 256, **options)

    def _asked(self, model: PolicyLM) -> Iterator[Any]:
        """All that a model will be asked."""
        for task in self.loaded["tasks"].values():
            task.set_fewshot_seed(seed=_FEWSHOT_SEED)
            chat = self.options.apply_chat_template
            task.build_all_requests(
                limit=self.options.limit, apply_chat_template=chat,
                chat_template=model.apply_chat_template if chat else None,
                tokenizer_name=model.tokenizer_name if chat else "", fewshot_as_multiturn=chat)
            yield from task.instances

    @property
    def scores(self) -> bool:
        """Whether it asks for log-probs of given texts."""
        return any(task.OUTPUT_TYPE != "generate_until" for task in self.loaded["tasks"].values())

    @cached_property
    def length(self) -> int:
        """Tokens of the longest prompt and answer, as far as the model reads them.

        Raises:
            ConfigError: for an answer that fills the model, or a way to sample that it does not
                have.
        """
        model, longest = self._model(None), 0
        with _quiet():
            asked = [*self._asked(model)]
        for request in asked:
            if request.request_type == "generate_until":
                prompt, most, *_ = model.wanted(request)
                if most >= self.limit - 1:
                    raise ConfigError(
                        f"eval.benchmarks: {self.name} wants answers of {most} tokens, which leave "
                        f"no room for a prompt in {self.limit}; set eval.benchmark_max_tokens if "
                        "the task does not say, or inference_model.max_model_len")
                longest = max(longest, len(prompt) + most)
            else:  # and one token that an engine samples behind it
                longest = max(longest, len(model.encode("".join(request.args))) + 1)
        return min(longest + 1, self.limit)

    @property
    def described(self) -> str:
        """For the screen."""
        tasks = self.loaded["tasks"].values()
        count = sum(len(task.eval_docs) if self.options.limit is None else min(
            self.options.limit, len(task.eval_docs)) for task in tasks)
        return f"{self.name}: {count:,} problems" + (
            f" of {len(tasks)} tasks" if len(tasks) > 1 else "")

    def evaluator(self, policy: Policy, *, rows: int, seed: int) -> HarnessEvaluator:
        """What asks it.

        Raises:
            ConfigError: if it wants texts scored and the engine cannot do that.
        """
        if self.scores and not policy.can_score:
            raise ConfigError(f"eval.benchmarks: {self.name} compares log-probs of given answers, "
                              "which are computed by an engine in this process alone; choose a "
                              "task that generates, or evaluate the checkpoints with python -m "
                              "grpo.run.evaluate")
        return HarnessEvaluator(self, self._model(policy, rows=rows, seed=seed))


@dataclass(frozen=True)
class HarnessEvaluator:
    """Asks a task of lm-eval."""

    task: HarnessTask
    model: PolicyLM

    @property
    def name(self) -> str:
        """That of the task."""
        return self.task.name

    def run(self) -> dict[str, dict[str, Any]]:
        """Of the task, or each of a group: ``problems``, ``num_fewshot``, ``version`` and
        ``metrics``, each with its ``value`` and ``stderr`` (None where it has none)."""
        from lm_eval import evaluator

        self.model.calls, chat = 0, self.task.options.apply_chat_template
        for task in self.task.loaded["tasks"].values():
            task.set_fewshot_seed(seed=_FEWSHOT_SEED)
        with _quiet(), mock.patch.dict(os.environ, DISABLE_MULTIPROC="1"):
            found = evaluator.evaluate(
                self.model, self.task.loaded, limit=self.task.options.limit, log_samples=False,
                bootstrap_iters=_RESAMPLES, apply_chat_template=chat, fewshot_as_multiturn=chat)
        return {f"{LM_EVAL}{name}": {
            "problems": (found["n-samples"].get(name) or {}).get("effective"),
            "num_fewshot": found["n-shot"].get(name), "version": found["versions"].get(name),
            "metrics": _metrics(values)} for name, values in found["results"].items()}


def _metrics(values: dict[str, Any]) -> dict[str, dict[str, float | None]]:
    """lm-eval's ``{"acc,none": 0.5, "acc_stderr,none": 0.1}`` by name.

    Examples:
        >>> _metrics({"alias": "sums", "acc,none": 0.5, "acc_stderr,none": "N/A"})
        {'acc': {'value': 0.5, 'stderr': None}}
    """
    found = {}
    for key, value in values.items():
        name, _, filtered = key.partition(",")
        if not filtered or name.endswith("_stderr") or not isinstance(value, (int, float)):
            continue
        error = values.get(f"{name}_stderr,{filtered}")
        found[name if filtered == "none" else f"{name}/{filtered}"] = {
            "value": float(value),
            "stderr": float(error) if isinstance(error, (int, float)) else None}
    return found


@contextmanager
def _quiet() -> Iterator[None]:
    """Without lm-eval's account of what it is doing."""
    theirs = logging.getLogger("lm_eval")
    before = theirs.level
    theirs.setLevel(logging.ERROR)
    try:
        with redirect_stderr(StringIO()):  # its progress bars, which cannot be told not to come
            yield
    finally:
        theirs.setLevel(before)
