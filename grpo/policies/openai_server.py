"""A policy behind any server that speaks OpenAI's ``/v1/completions``, for evaluation.

Prompts are sent as token ids, which vLLM, SGLang and others take, or as text. Servers of vLLM and
our own answer with the sampled ids; from others the text is tokenised here, so that a completion is
read as it was written, though not always cut into the same tokens. Log-probs are not asked for: the
rows cannot be trained on. What can is :class:`~grpo.policies.stock_server.StockPolicy`.
"""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, Literal, NamedTuple

import httpx

from grpo.policies.base import Completions, Policy, RowListener, Sampling
from grpo.policies.handle import EngineError

#: Statuses after which a server may still answer.
_AGAIN = {408, 409, 425, 429, 500, 502, 503, 504}
#: Reasons of a completion that ended by itself; ``eos_token`` is that of text-generation-inference.
_ENDED = {"stop", "eos_token", "tool_calls"}
_PAUSE, _LONGEST_PAUSE, _LOOK = 0.5, 20.0, 10.0  # seconds


class OpenAIServerError(EngineError):
    """The server refused a request, or did not answer before the deadline."""


class Row(NamedTuple):
    """What was sampled for one prompt."""

    tokens: list[int]
    log_probs: list[float]
    cut: bool  # by the limit


class OpenAIPolicy(Policy):
    """Sample over ``/v1/completions``, one request a row, many at a time.

    A request that fails on its way, or is answered with a status such as 429 or 503, is made again
    after a growing pause, until the deadline of the whole call.

    Args:
        url: ``http://host:8000`` or with a path such as ``https://host/api/v1``.
        sampling: see :class:`~grpo.policies.base.Sampling`.
        tokenizer: the model's.
        model: its name at the server; None: the only one that is served.
        send: prompts as ``tokens`` or as ``text``.
        api_key: sent as a bearer token.
        timeout: seconds for a call, with all that is tried again.
        connections: requests at a time.
        options: those of :class:`~grpo.policies.base.Policy`; ``max_model_len`` is what the server
            says, if it does and that is less.

    Raises:
        ValueError: for an address that is none.
        OpenAIServerError: if nobody answers there, or the model is not served.

    Examples:
        >>> policy = OpenAIPolicy("http://127.0.0.1:8000", Sampling(max_tokens=8),
        ...     tokenizer=tokenizer, pad_token_id=0, eos_token_ids=(1,),
        ...     max_model_len=64)                                            # doctest: +SKIP
        >>> policy.generate_from_ids([[5, 6, 7]])["tokens", "response"]      # doctest: +SKIP
    """

    #: How whoever uses it gives it more time; a run has a key for that.
    more_time: str = "give timeout=SECONDS"

    def __init__(
        self, url: str, sampling: Sampling, *, tokenizer: Any, model: str | None = None,
        send: Literal["tokens", "text"] = "tokens", api_key: str | None = None,
        timeout: float = 1200.0, connections: int = 64, **options: Any,
    ) -> None:
        super().__init__(sampling, **options)
        self.url, self.tokenizer, self.send, self.timeout = api_root(url), tokenizer, send, timeout
        self.connections = connections
        self._client = httpx.Client(
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            limits=httpx.Limits(max_connections=connections))
        card = self._served(model)
        self.served = card["id"]
        #: Fields beside OpenAI's, which strict servers refuse.
        self._own: dict[str, Any] = {}
        if card.get("owned_by") == "vllm":
            # Else it would sample as the model's generation_config.json says.
            self._own = {"return_token_ids": True, "top_k": -1, "min_p": 0.0,
                         "repetition_penalty": 1.0, "add_special_tokens": False}
        if limit := card.get("max_model_len"):
            self.max_model_len = min(self.max_model_len, limit)

    def close(self) -> None:
        self._client.close()

    def _served(self, model: str | None) -> dict[str, Any]:
        cards = self._call("GET", "/models", None, time.monotonic() + _LOOK)["data"]
        names = [card["id"] for card in cards]
        if model is None and len(names) != 1:
            raise OpenAIServerError(f"{self.url} serves {', '.join(names) or 'no model'}; say "
                                    "which with served_model=NAME")
        if model is not None and model not in names:
            raise OpenAIServerError(f"{self.url} serves {', '.join(names) or 'no model'}, and not "
                                    f"served_model={model}")
        return cards[0] if model is None else cards[names.index(model)]

    def _generate(self, prompts: list[list[int]], on_row: RowListener | None = None) -> Completions:
        deadline, given_up = time.monotonic() + self.timeout, threading.Event()
        rows: dict[int, Row] = {}
        with ThreadPoolExecutor(self.connections) as pool:
            asked = {pool.submit(self._row, prompt, row, deadline, given_up): row
                     for row, prompt in enumerate(prompts)}
            try:
                for done in as_completed(asked):
                    row = asked[done]
                    rows[row] = done.result()
                    if on_row is not None:
                        on_row(row, rows[row].tokens)
            except BaseException:
                given_up.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        tokens, log_probs, cut = zip(*(rows[row] for row in range(len(prompts))), strict=True)
        return Completions([*tokens], [*log_probs], [*cut])

    def _row(self, prompt: list[int], row: int, deadline: float,
             given_up: threading.Event) -> Row:
        limit = self._limit(prompt)
        greedy = self.sampling.temperature == 0
        body = {"model": self.served, "max_tokens": limit, "n": 1, "top_p": 1.0,
                "prompt": prompt if self.send == "tokens" else self.tokenizer.decode(prompt),
                "temperature": float(self.sampling.temperature), **self._own,
                **({} if greedy else {"seed": self.sampling.row_seed(self.calls, row)})}
        answer = self._call("POST", "/completions", body, deadline, given_up)
        try:
            choice = answer["choices"][0]
            reason, ids = choice["finish_reason"], choice.get("token_ids")
            cut = reason == "length"
            if ids is None:
                ids = self.tokenizer(choice["text"], add_special_tokens=False)["input_ids"]
                if not cut:
                    ids = [*ids, self.eos_token_ids[0]]
        except (KeyError, IndexError, TypeError) as error:
            raise OpenAIServerError(f"POST {self.url}/completions: the answer has no completion "
                                    f"({error!r}): {str(answer)[:200]}") from error
        if not cut and reason not in _ENDED:
            raise OpenAIServerError(f"POST {self.url}/completions: a completion with finish_reason="
                                    f"{reason!r} is a fragment, which cannot be scored; ask again "
                                    "while nobody pauses the server or aborts its requests")
        ids = ids[:self.sampling.max_tokens]
        return Row(ids, [0.0] * len(ids), cut)

    def _limit(self, prompt: list[int]) -> int:
        """Tokens of a response at most."""
        return min(self.sampling.max_tokens, self.max_model_len - len(prompt))

    def _call(self, method: str, path: str, body: dict[str, Any] | None, deadline: float,
              given_up: threading.Event | None = None) -> dict[str, Any]:
        """The JSON of an answer; tried again while the server may still give one. A ``path`` may
        be a whole address, for routes beside OpenAI's."""
        address = path if "://" in path else self.url + path
        what, pause, said = f"{method} {address}", _PAUSE, "no answer"
        given_up = given_up or threading.Event()
        while (left := deadline - time.monotonic()) > 0:
            try:
                answer = self._client.request(method, address, json=body, timeout=left)
            except httpx.TransportError as error:
                said = str(error) or type(error).__name__
            else:
                if answer.is_success:
                    return _json(answer, what)
                said = f"{_reason(answer)} (status {answer.status_code})"
                if answer.status_code not in _AGAIN:
                    raise OpenAIServerError(f"{what}: {said}")
                pause = max(pause, _asked_to_wait(answer))
            # Apart, so that rows that were refused together do not come back together.
            if given_up.wait(min(pause * random.SystemRandom().uniform(0.5, 1.0),
                                 max(0.0, deadline - time.monotonic()))):
                break
            pause = min(2 * pause, _LONGEST_PAUSE)
        raise OpenAIServerError(f"{what}: {said}, until the deadline; is the server running, and "
                                f"is the address right? See its log, or {self.more_time}")


def api_root(url: str) -> str:
    """Where the routes of a server begin.

    Raises:
        ValueError: for an address that is none.

    Examples:
        >>> api_root("http://127.0.0.1:8000/"), api_root("https://host/api/v1")
        ('http://127.0.0.1:8000/v1', 'https://host/api/v1')
    """
    try:
        parts = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ValueError(f"url={url}: {error}; give such as http://127.0.0.1:8000") from None
    if parts.scheme not in ("http", "https") or not parts.host:
        raise ValueError(f"url={url} must begin with http:// or https:// and name a host, such as "
                         "http://127.0.0.1:8000")
    return url.rstrip("/") + ("" if parts.path.strip("/") else "/v1")


def _json(answer: httpx.Response, what: str) -> dict[str, Any]:
    try:
        value = answer.json()
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise OpenAIServerError(f"{what}: the answer is no JSON object; does another program "
                                f"listen there? It said {answer.text[:100]!r}")
    return value


def _reason(answer: httpx.Response) -> str:
    """What a server says of a request that it refuses."""
    try:
        error = answer.json()
        error = error.get("error", error)
        return str(error.get("message", error) if isinstance(error, dict) else error)[:300]
    except (ValueError, AttributeError):
        return answer.text[:300] or answer.reason_phrase


def _asked_to_wait(answer: httpx.Response) -> float:
    """Seconds of a ``Retry-After``."""
    try:
        return min(float(answer.headers.get("retry-after", 0)), _LONGEST_PAUSE)
    except ValueError:  # a date
        return 0.0
