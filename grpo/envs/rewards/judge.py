"""A reward that a language model gives, at any address that speaks OpenAI's API."""

from __future__ import annotations

import asyncio
import math
import os
import random
import re
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo.envs.rewards.registry import RewardResult, check_finite, register_reward
from grpo.envs.tasks.base import Problem

PROMPT = """Judge an answer to a problem.

Problem:
{prompt}

Reference answer, which may be missing:
{answer}

Answer to be judged:
{completion}

Say in short what is right and what is wrong in it. Then write a last line with nothing but
"Score: N", where N is a number from {lowest} (worthless) to {highest} (faultless)."""

_SCORE = re.compile(r"Score: (-?\d+(?:\.\d+)?)")
_PLACES = re.compile(r"{(prompt|answer|completion|lowest|highest)}")
#: Answers after which asking again may help: the server is late, busy, or fails.
_PASSING = {408, 409, 425, 429, 500, 502, 503, 504}
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 8.0  # seconds between tries
_pauses = random.Random(0)  # of its own, so that it draws from nobody else's


class JudgeError(RuntimeError):
    """The judge did not answer, or not in the format."""


def check_judge(
    *, url: str, prompt: str, scale: Sequence[float], key_variable: str | None, success: float,
    temperature: float, max_tokens: int, concurrency: int, timeout: float, retries: int,
    **_: object,
) -> None:
    """Raises ValueError for what cannot work."""
    # Its import draws random numbers, by which the first call would be taken for one that does.
    import httpx  # noqa: F401

    check_finite("judge", success=success, temperature=temperature, timeout=timeout)
    least = {"temperature": (temperature, 0), "max_tokens": (max_tokens, 1),
             "concurrency": (concurrency, 1), "retries": (retries, 0)}
    for name, (value, minimum) in least.items():
        if value < minimum:
            raise ValueError(f"{name}={value} of the reward 'judge' must be at least {minimum}")
    if timeout <= 0:
        raise ValueError(f"timeout={timeout} of the reward 'judge' must be above 0 seconds")
    if not re.match(r"https?://[^/]+", url):
        raise ValueError(f"url={url!r} of the reward 'judge' must be an address such as "
                         "http://127.0.0.1:8000/v1")
    if key_variable is not None and not os.environ.get(key_variable):
        raise ValueError(f"key_variable={key_variable} of the reward 'judge': the environment has "
                         "no such variable; set it to the server's key")
    if len(scale) != 2 or not -math.inf < scale[0] < scale[1] < math.inf:
        raise ValueError(f"scale={list(scale)} of the reward 'judge' must be two numbers, the "
                         "lowest score and the highest")
    if "{completion}" not in _template(prompt):
        raise ValueError("prompt of the reward 'judge' must be a text with {completion} in it, or "
                         f"the path of a file that has one, not {prompt!r:.80}")


def places_of_server(*, url: str, concurrency: int, **_: object) -> tuple[str, int]:
    """Whose places a question takes, and how many there are."""
    return url, concurrency


@register_reward("judge", check=check_judge, share=places_of_server)
async def judge(
    completion: str, problem: Problem, *, url: str, model: str, prompt: str = PROMPT,
    scale: Sequence[float] = (0, 10), success: float = 1.0, key_variable: str | None = None,
    temperature: float = 0.0, max_tokens: int = 512, concurrency: int = 16, timeout: float = 20.0,
    retries: int = 3,
) -> RewardResult:
    """``(score - lowest) / (highest - lowest)`` for the score that a model gives, from 0 to 1.

    The last line of its answer must be ``Score: N`` with a number within the scale. Where it is
    not, the call fails and the row is masked; it is not asked again, because an answer that is
    asked for until it fits is another judge's.

    Args:
        completion: to be judged.
        problem: of it.
        url: to which ``/chat/completions`` is added, such as ``http://127.0.0.1:8000/v1``.
        model: as the server calls it.
        prompt: what it is asked, or the path of a file that says it; ``{prompt}``, ``{answer}``,
            ``{completion}``, ``{lowest}`` and ``{highest}`` are put in.
        scale: the lowest and the highest score.
        success: the least reward that counts as solved.
        key_variable: environment variable with the server's key.
        temperature: of the judge.
        max_tokens: of its answer.
        concurrency: questions to a server at a time; also not more than ``env.reward_workers``.
            Those that wait for their turn have no deadline yet.
        timeout: seconds for an answer. ``env.reward_timeout`` is for all tries together.
        retries: after no answer, a late one, or a status such as 429 or 503. Between tries are 0.5,
            1, 2, ... seconds, or what the server asks for with ``Retry-After``, at most 8.

    Raises:
        JudgeError: if there is no answer, or one without a score.
    """
    question = {"model": model, "temperature": temperature, "max_tokens": max_tokens, "messages": [
        {"role": "user", "content": _filled(_template(prompt), completion, problem, scale)}]}
    key = os.environ[key_variable] if key_variable is not None else None
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    said = await _ask(_client(), f"{url.rstrip('/')}/chat/completions", question, headers,
                      timeout=timeout, retries=retries)
    lowest, highest = scale
    reward = (score_in(said, lowest, highest) - lowest) / (highest - lowest)
    return RewardResult(reward, reward >= success)


def score_in(answer: str, lowest: float, highest: float) -> float:
    r"""The score on the last line of an answer.

    Raises:
        JudgeError: if there is none within the scale.

    Examples:
        >>> score_in("The sum is wrong.\nScore: 2.5\n", 0, 10)
        2.5
    """
    last = answer.strip().rpartition("\n")[2].strip()
    found = _SCORE.fullmatch(last)
    if found is None or not lowest <= float(found[1]) <= highest:
        raise JudgeError(f"the judge's last line is {last!r:.200}, not 'Score: N' with a number "
                         f"from {lowest:g} to {highest:g}")
    return float(found[1])


async def _ask(
    client: Any, address: str, question: dict, headers: dict, *, timeout: float, retries: int
) -> str:
    import httpx

    for attempt in range(retries + 1):
        pause = min(_FIRST_PAUSE * 2**attempt, _LONGEST_PAUSE) * _pauses.uniform(0.8, 1.2)
        try:
            answer = await client.post(address, json=question, headers=headers, timeout=timeout)
        except httpx.TransportError as error:
            trouble = f"{type(error).__name__} {error}".strip()
        else:
            if answer.is_success:
                return _content(answer)
            trouble = f"status {answer.status_code}: {answer.text[:200]}"
            if answer.status_code not in _PASSING:
                break
            asked = answer.headers.get("Retry-After", "")
            pause = min(float(asked), _LONGEST_PAUSE) if asked.isdecimal() else pause
        if attempt < retries:
            await asyncio.sleep(pause)
    raise JudgeError(f"the judge at {address} gave no answer in {attempt + 1} tries, at last: "
                     f"{trouble}")


def _content(answer: Any) -> str:
    try:
        said = answer.json()["choices"][0]["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError):
        said = None
    if not isinstance(said, str):
        raise JudgeError(f"the judge's answer is no chat completion: {answer.text[:200]}")
    return said


def _template(prompt: str) -> str:
    is_file = "\n" not in prompt and "{" not in prompt and Path(prompt).is_file()
    return Path(prompt).read_text(encoding="utf-8") if is_file else prompt


def _filled(template: str, completion: str, problem: Problem, scale: Sequence[float]) -> str:
    asked = problem.prompt if isinstance(problem.prompt, str) else "\n\n".join(
        f"{message['role']}: {message['content']}" for message in problem.prompt)
    values = {"prompt": asked, "answer": problem.answer, "completion": str(completion),
              "lowest": f"{scale[0]:g}", "highest": f"{scale[1]:g}"}
    # In one go, because what is put in may have braces of its own.
    return _PLACES.sub(lambda place: values[place[1]], template)


_clients: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # by event loop


def _client() -> Any:
    import httpx

    loop = asyncio.get_running_loop()
    if loop not in _clients:
        # As many connections as there are questions at a time, which who calls this counts.
        _clients[loop] = httpx.AsyncClient(limits=httpx.Limits(max_connections=None))
    return _clients[loop]
