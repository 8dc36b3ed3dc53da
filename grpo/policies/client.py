"""A blocking client of the engine server, with a deadline on every call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson

from grpo.policies.handle import EngineError, EngineHandle, PauseMode
from grpo.system.json_client import CallError, JsonClient


class EngineCallError(CallError, EngineError):
    """The engine server refused or failed a call."""


class EngineTimeoutError(EngineCallError, TimeoutError):
    """A call's deadline passed."""


class EngineUnreachableError(EngineCallError, ConnectionError):
    """There is no server at the address, or it went away during the call."""


@dataclass(frozen=True)
class Generated:
    """What was sampled for one prompt, one list entry a sample."""

    tokens: list[list[int]]  # the end token included
    log_probs: list[list[float]]  # of each token, under the distribution that sampled it
    finish_reasons: list[str]  # ``stop``, ``length`` or ``abort``
    versions: list[list[list[int]]]  # ``[[policy version, tokens], ...]`` in order


class EngineClient(JsonClient, EngineHandle):
    """Calls to :mod:`grpo.server.serve`; an ``EngineHandle`` for the weights.

    Args:
        url: ``http://host:port``.
        token: access token of the server.
        timeout: seconds a call may take unless it is given its own.

    Raises:
        ValueError: for an address that is not ``http://host:port``.

    Examples:
        >>> client = EngineClient("http://127.0.0.1:9001")
        >>> client.generate([[5, 6, 7]], max_tokens=8)[0].tokens         # doctest: +SKIP
        [[41, 3, 97, 12, 8, 55, 20, 31]]
    """

    refused = EngineCallError
    timed_out = (EngineTimeoutError, "; is the engine paused? Else give the call more time, or see "
                 "the server's log")
    unreachable = (EngineUnreachableError, "is the server running? See its log")

    def __str__(self) -> str:
        return f"engine server at {self.url}"

    def alive(self) -> bool:
        """True if the server answers and its engine lives; waits 5 seconds at most."""
        return self.answers("/health")

    def info(self) -> dict[str, Any]:
        """What the server is: model, dtype, policy version, paused and so on."""
        return self.call("GET", "/bridge/info")

    def requests(self) -> int | None:
        """How many requests to sample have come to the server; None if that is not to be had."""
        try:
            return self.call("GET", "/bridge/info", timeout=min(5.0, self.timeout)).get("requests")
        except EngineCallError:
            return None

    def generate(
        self,
        prompts: list[list[int]],
        *,
        timeout: float | None = None,
        on_answer: Callable[[int, Generated], None] | None = None,
        **sampling: Any,
    ) -> list[Generated]:
        """Sample from several prompts in one call.

        Args:
            prompts: token ids of each prompt.
            timeout: seconds for all of them.
            on_answer: gets the number of each prompt and what was sampled for it as soon as it is
                complete, in this thread.
            **sampling: fields of :class:`~grpo.server.api.SamplingFields`.

        Returns:
            One entry a prompt, in order.
        """
        body = {"prompt_token_ids": prompts, "logprobs": 0, "flat_logprobs": True,
                "return_text": bool(sampling.get("stop")), **sampling}
        if on_answer is None:
            answer = self.call("POST", "/generate", body, timeout=timeout)
            return [_generated(one) for one in answer["results"]]
        answers: dict[int, Generated] = {}
        refused: list[bytes] = []

        def read(line: bytes) -> None:
            value = orjson.loads(line)
            if "error" in value:  # the head of the answer, and its status, had left by then
                refused.append(line)
                return
            row = value["prompt_index"]
            answers[row] = _generated(value)
            on_answer(row, answers[row])

        self.exchange("POST", "/generate", {**body, "stream": "answers"}, timeout=timeout,
                      on_line=read)
        what = f"POST {self.url}/generate"
        if refused:
            raise self.refusal(what, refused[0], 500)
        if len(answers) < len(prompts):
            raise EngineUnreachableError(f"{what}: the answer ended after {len(answers)} of "
                                         f"{len(prompts)} prompts; see the server's log")
        return [answers[row] for row in range(len(prompts))]

    def collective_rpc(self, method: str, *args: Any, timeout: float | None = None) -> list[Any]:
        """Call a method of the weight worker on every worker; one result each."""
        return self._wait("/bridge/rpc", timeout, method=method, args=list(args))["results"]

    def pause(
        self, mode: PauseMode = "keep", *, clear_cache: bool = True,
        timeout: float | None = None,
    ) -> None:
        """Stop sampling; see :meth:`grpo.server.versioned.VersionedEngine.pause`."""
        self._wait("/bridge/pause", timeout, mode=mode, clear_cache=clear_cache)

    def resume(self, *, timeout: float | None = None) -> None:
        """Go on sampling."""
        self._wait("/bridge/resume", timeout)

    def sleep(self, level: int = 1, *, timeout: float | None = None) -> None:
        """Free the engine's memory, aborting what runs."""
        self._wait("/bridge/sleep", timeout, level=level)

    def wake_up(self, *, timeout: float | None = None) -> None:
        """End :meth:`sleep`."""
        self._wait("/bridge/wake_up", timeout)

    def reset_prefix_cache(self, timeout: float | None = None) -> bool:
        """Forget cached keys and values; False if running requests hold some."""
        return self._wait("/bridge/reset_prefix_cache", timeout)["reset"]

    @property
    def version(self) -> int:
        """Policy version of the tokens that are sampled now."""
        return self.call("GET", "/bridge/version")["version"]

    def set_version(self, version: int) -> None:
        """Set the policy version; the engine must be paused or idle."""
        self.call("POST", "/bridge/version", {"version": version})

    def load_lora(
        self, path: str | None = None, *, adapter_id: int | None = None, name: str = "adapter",
        version: int | None = None, timeout: float | None = None,
    ) -> str:
        """Use the adapter in a folder, or the one of this id in the workers' memory.

        Returns the name under which requests can ask for it.
        """
        return self._wait("/lora/load", timeout, adapter_path=path, adapter_id=adapter_id,
                          adapter_name=name, version=version)["adapter_name"]

    def lora_fingerprints(
        self, shapes: dict[str, list[int]], *, timeout: float | None = None
    ) -> list[dict[str, list]]:
        """What each worker's slot holds of the adapter that new requests use.

        It is ``[{}]`` where they use none; for ``shapes`` and the answers of workers see
        :func:`~grpo.weights.worker.lora.slot_fingerprints`.
        """
        adapter_id = self.call("GET", "/lora/status")["active_adapter_id"]
        if adapter_id is None:
            return [{}]
        return self.collective_rpc("lora_fingerprints", adapter_id, shapes, timeout=timeout)

    def unload_lora(self, *, timeout: float | None = None) -> None:
        """Go back to the base model."""
        self._wait("/lora/unload", timeout)

    def _wait(self, path: str, timeout: float | None, **body: Any) -> dict[str, Any]:
        """Call a route that has a deadline of its own; ours comes a little later."""
        timeout = self.timeout if timeout is None else timeout
        return self.call("POST", path, {**body, "timeout": timeout}, timeout=timeout + 2.0)


def _generated(value: dict[str, Any]) -> Generated:
    return Generated(value["token_ids"], value["logprobs"], value["finish_reasons"],
                     value["policy_version"])
