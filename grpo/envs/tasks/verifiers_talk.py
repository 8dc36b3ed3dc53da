"""A conversation that a verifiers environment holds itself, with us in the place of its model.

The environment's own ``rollout`` runs unchanged. It asks a client for what the model says; this
one's answers are the turns that an engine has sampled. What it asks with the next time, beyond what
it knows already, is what it has said.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextvars import ContextVar
from copy import deepcopy
from typing import Any

from grpo.envs.tasks.tool_calls import read_tool_calls

_SIGN_OF_LIFE = 1.0  # seconds in which a loop that is not held up gets to something new
_LOOK = 0.05  # seconds between two looks, when an exception from outside comes through
_SILENCE = 7200.0  # seconds after which nobody is going to say anything more
_FAILURES: ContextVar[list[str] | None] = ContextVar("failures", default=None)
_STOP = object()


class Talk:
    """One conversation, a :class:`~grpo.envs.tasks.base.Partner`.

    Whatever fails in the environment ends the conversation, and :meth:`score` raises it: it costs
    this row, as the failure of a reward does.

    Args:
        environment: of verifiers.
        row: of its data set.
    """

    def __init__(self, environment: Any, row: Mapping[str, Any]) -> None:
        self.environment = environment
        self._turns: asyncio.Queue[Any] = asyncio.Queue()
        self._asked: queue.SimpleQueue[Sequence[Any] | None] = queue.SimpleQueue()
        self._known = _texts(row["prompt"])  # what has been said, by role and content
        self._over, self._failure, self._said = False, "", 0
        self._rollout = self._run(environment.rollout(
            deepcopy(dict(row)), _client_class()(self), "policy", {}))
        self._rollout.add_done_callback(lambda future: self._asked.put(None))

    def reply(self, text: str, *, truncated: bool, seconds: float) -> list[dict[str, Any]] | None:
        """See :class:`~grpo.envs.tasks.base.Partner`."""
        # It asks for the first turn once it is set up, by the prompt that the model had.
        if self._said == 0 and self._next(seconds):
            self._fail("the environment says more before the first turn than the prompt in its "
                       "data set, which the model was given; have the data set say it")
        if self._over:
            return None
        said, calls = read_tool_calls(text)
        self._known.append(("assistant", said))
        self._said += 1
        self._put((said, calls, truncated))
        return self._next(seconds)

    def stop(self, *, seconds: float) -> None:
        """See :class:`~grpo.envs.tasks.base.Partner`."""
        if not self._over:
            self._put(_STOP)
            self._next(seconds)

    def score(self) -> float:
        """What its rubric gives.

        Raises:
            RuntimeError: if the environment or one of its reward functions failed.
        """
        if self._failure:
            raise RuntimeError(self._failure)
        state = _result(self._rollout)
        if state.get("error") is not None:
            raise RuntimeError(f"the environment failed: {state['error']!r}")
        return _result(self._run(self._score(state)))

    async def _score(self, state: Any) -> float:
        failures: list[str] = []
        _FAILURES.set(failures)
        await self.environment.rubric.score_rollout(state)
        await self.environment.rubric.cleanup(state)
        if failures:
            raise RuntimeError("; ".join(failures))
        return float(state["reward"])

    async def turn(self) -> Any:
        """What the model says next, for the client; ``_STOP`` if nothing."""
        return await asyncio.wait_for(self._turns.get(), _SILENCE)

    def _next(self, seconds: float) -> list[dict[str, Any]] | None:
        """What the environment says before it asks for the next turn; None if it does not ask or
        says nothing, as two turns of the model with nothing between them would be one."""
        prompt = self._wait(seconds)
        if prompt is None:
            self._over = True
            return None
        try:
            texts = _texts(prompt)
        except TypeError as error:
            return self._fail(str(error))
        if texts[:len(self._known)] != self._known:
            return self._fail("the environment changes what has been said already, and tokens that "
                              "were sampled stay as they are")
        new, self._known = texts[len(self._known):], texts
        return [{"role": role, "content": content} for role, content in new] or None

    def _wait(self, seconds: float) -> Sequence[Any] | None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                return self._asked.get(timeout=_LOOK)
            except queue.Empty:
                pass
        self._fail(f"the environment did not answer within {seconds:g} s{_held_up()}")
        return None

    def _fail(self, why: str) -> None:
        self._over, self._failure = True, why
        self._rollout.cancel()

    def _put(self, turn: Any) -> None:
        _loop().call_soon_threadsafe(self._turns.put_nowait, turn)

    @staticmethod
    def _run(coroutine: Any) -> Future:
        return asyncio.run_coroutine_threadsafe(coroutine, _loop())


def raising(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A rubric's function that tells of its failures, which the rubric would count as 0."""
    @functools.wraps(fn)
    async def told(*args: Any, **options: Any) -> Any:
        try:
            value = fn(*args, **options)
            return await value if inspect.isawaitable(value) else value
        except Exception as error:
            failures = _FAILURES.get()
            if failures is not None:
                failures.append(f"{getattr(fn, '__name__', fn)}: {type(error).__name__}: {error}")
            raise

    return told


def _texts(messages: Sequence[Any]) -> list[tuple[str, str]]:
    """Role and text of each message.

    Raises:
        TypeError: if one has something else than text.
    """
    return [(_of(message, "role"), _text(_of(message, "content"))) for message in messages]


def _of(message: Any, key: str) -> Any:
    return message.get(key) if isinstance(message, Mapping) else getattr(message, key)


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = [_of(part, "text") if _of(part, "type") == "text" else None for part in content]
    if None in parts:
        raise TypeError("the environment says something that is no text")
    return "".join(parts)


def _result(future: Future) -> Any:
    """Wait for it in short looks, so that the deadline of a reward can end the wait."""
    try:
        while not future.done():
            try:
                return future.result(_LOOK)
            except TimeoutError:
                continue
        return future.result()
    except BaseException:
        future.cancel()
        raise


@functools.cache
def _client_class() -> type:
    """A client of verifiers whose model is a :class:`Talk`."""
    from verifiers.clients import Client
    from verifiers.errors import OverlongPromptError
    from verifiers.types import Response, ResponseMessage, ToolCall

    class TalkClient(Client):
        async def get_response(self, prompt: Any, model: str, sampling_args: Any,
                               tools: Any = None, **options: Any) -> Response:
            talk = self.client
            talk._asked.put(prompt)
            turn = await talk.turn()
            if turn is _STOP:  # as where a model has no room for more
                raise OverlongPromptError("the model says no more")
            text, calls, truncated = turn
            message = ResponseMessage(
                content=text, is_truncated=truncated,
                tool_calls=[ToolCall(id=f"call_{talk._said}_{i}", name=call.name,
                                     arguments=json.dumps(call.arguments))
                            for i, call in enumerate(calls)] or None,
                finish_reason="length" if truncated else "tool_calls" if calls else "stop")
            return Response(id=f"turn_{talk._said}", created=int(time.time()), model=model,
                            message=message)

        def setup_client(self, config: Any) -> Any:
            raise NotImplementedError("a conversation has its client from the start")

        async def close(self) -> None:
            """There is nothing to close."""

        to_native_tool = to_native_prompt = get_native_response = setup_client
        raise_from_native_response = from_native_response = setup_client

    return TalkClient


def _held_up() -> str:
    """Why conversations that have done nothing wrong are late, too, if that is so."""
    alive = threading.Event()
    _loop().call_soon_threadsafe(alive.set)
    return "" if alive.wait(_SIGN_OF_LIFE) else (
        "; one of its functions, or of another environment of verifiers, computes or waits without "
        "await, which holds up all conversations: let it await asyncio.to_thread(...)")


_STARTING = threading.Lock()


def _loop() -> asyncio.AbstractEventLoop:
    with _STARTING:
        return _started_loop()


@functools.cache
def _started_loop() -> asyncio.AbstractEventLoop:
    """The event loop of all environments, whose clients and locks belong to one loop."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="verifiers", daemon=True).start()
    return loop
