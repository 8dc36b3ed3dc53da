"""Servers of vLLM and SGLang that are not of this library: what they can do, and rollouts by them.

Prompts are sent as token ids, and answers are read as the ids that were sampled with their
log-probs: OpenAI's ``/v1/completions`` of vLLM, whose ``return_token_ids`` gives both, and SGLang's
own ``/generate``. How such a server gets new weights is in :mod:`grpo.weights.stock`.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args

from grpo.policies.base import Sampling
from grpo.policies.client import EngineCallError, EngineTimeoutError, EngineUnreachableError
from grpo.policies.openai_server import OpenAIPolicy, OpenAIServerError, Row
from grpo.system.json_client import JsonClient

Kind = Literal["vllm", "sglang"]
#: What a server says of a tensor that it keeps elsewhere, packed for its kernels.
PACKED = hashlib.sha256().hexdigest()
_LOOK = 10.0  # seconds

# Routes that tell what a server offers; each takes POST alone, so that a GET changes nothing.
_RELOAD = {"vllm": "/collective_rpc", "sglang": "/update_weights_from_disk"}
_LORA = {"vllm": "/v1/load_lora_adapter", "sglang": "/load_lora_adapter"}
_UNLOAD = {"vllm": "/v1/unload_lora_adapter", "sglang": "/unload_lora_adapter"}


class StockServer(JsonClient):
    """Calls to a server of vLLM or SGLang, with a deadline on each.

    Args:
        url: ``http://host:port``.
        token: API key of the server.
        timeout: seconds a call may take unless it is given its own.

    Attributes:
        owner: who it says it is.
        kind: the same; None: nobody who takes weights.
        model: name that the base model is served as.
        adapter: name of the adapter that requests ask for; None: the base model.
        max_model_len: tokens of prompt and response; None: it does not say.

    Raises:
        EngineUnreachableError: if nobody answers.
        EngineCallError: if who answers serves no models.

    Examples:
        >>> server = StockServer("http://127.0.0.1:8000")            # doctest: +SKIP
        >>> server.kind, server.reloads, server.takes_adapters       # doctest: +SKIP
        ('vllm', False, True)
    """

    refused = EngineCallError
    timed_out = (EngineTimeoutError, "; see the server's log")
    unreachable = (EngineUnreachableError, "is the server running? See its log")

    def __init__(self, url: str, *, token: str | None = None, timeout: float = 120.0) -> None:
        super().__init__(url, token=token, timeout=timeout)
        cards = self.call("GET", "/v1/models", timeout=_LOOK).get("data") or [{}]
        # Adapters that others have loaded are listed, too.
        card = next((card for card in cards if not card.get("parent")), cards[0])
        self.owner: str | None = card.get("owned_by")
        self.kind: Kind | None = self.owner if self.owner in get_args(Kind) else None
        self.model: str = card.get("id", "")
        self.adapter: str | None = None
        self.max_model_len: int | None = card.get("max_model_len")

    def __str__(self) -> str:
        return f"{self.kind} server at {self.url}"

    @property
    def reloads(self) -> bool:
        """Whether it reads checkpoints that it is told of."""
        return self.kind is not None and self._has(_RELOAD[self.kind])

    @property
    def takes_adapters(self) -> bool:
        """Whether it has a route for adapters; it may still have been started without them."""
        return self.kind is not None and self._has(_LORA[self.kind])

    def read_checkpoint(self, folder: Path, *, timeout: float) -> None:
        """Have the weights read anew from a folder, and what was computed with the old forgotten.

        Raises:
            EngineCallError: if the server fails to, or still serves another folder.
        """
        if self.kind == "sglang":
            answer = self.call("POST", _RELOAD["sglang"], {
                "model_path": str(folder), "flush_cache": True}, timeout=timeout)
            served = self.call("GET", "/get_model_info", timeout=_LOOK).get("model_path")
            if not answer.get("success") or served != str(folder):
                raise EngineCallError(f"{self} did not take up {folder}, but serves {served}: "
                                      f"{answer.get('message')}")
            return
        pauses = self._has("/pause")
        if pauses:  # what others have asked is finished with the old weights
            self.exchange("POST", "/pause?mode=wait", timeout=timeout)
        try:
            self.exchange("POST", _RELOAD["vllm"], {
                "method": "reload_weights", "kwargs": {"weights_path": str(folder)},
                "timeout": timeout}, timeout=timeout)
            raw = self.exchange("POST", "/reset_prefix_cache", timeout=timeout)
            if b"false" in raw:
                raise EngineCallError(f"{self} keeps what it computed with older weights, because "
                                      "requests of others are running; let no one else use it")
        finally:
            if pauses:
                self.exchange("POST", "/resume", timeout=_LOOK)

    def digests(self) -> dict[str, str]:
        """SHA-256 of the bytes of each tensor of vLLM's model, by its name; empty where the server
        does not tell, or has parts of tensors in several workers."""
        if self.kind != "vllm" or not self._has("/weight_checker"):
            return {}
        found = self.call("POST", "/weight_checker", {"action": "checksum"})["checksums"]
        names = Counter(key.rpartition(":")[2] for key in found)
        if max(names.values(), default=1) > 1:
            return {}
        return {key.rpartition(":")[2].replace(".base_layer.", "."): digest
                for key, digest in found.items()}

    def load_adapter(self, name: str, folder: Path, *, timeout: float) -> None:
        """Have an adapter read from a folder; requests ask for it from now on."""
        self.exchange("POST", _LORA[self.kind], {
            "lora_name": name, "lora_path": str(folder)}, timeout=timeout)
        self.adapter = name

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter."""
        self.exchange("POST", _UNLOAD[self.kind], {"lora_name": name})

    def _has(self, path: str) -> bool:
        try:
            self.exchange("GET", path, timeout=_LOOK)
        except EngineCallError as error:
            return error.status not in (None, 404)
        return True


class StockPolicy(OpenAIPolicy):
    """Sample on a stock server, one request a row, with ids and log-probs as they were sampled.

    The log-probs must be those of the distribution that was sampled: vLLM's are with
    ``--logprobs-mode processed_logprobs``, or at temperature 1; SGLang's are. A canary checks it.

    Args:
        server: where, and the adapter that requests ask for.
        sampling: see :class:`~grpo.policies.base.Sampling`.
        seeded: draw the same samples again for the same seed and call, where the server can.
        ignore_eos: always generate ``max_tokens``; for benchmarks.
        stop: what :meth:`close` calls.
        options: those of :class:`~grpo.policies.openai_server.OpenAIPolicy`.

    Raises:
        OpenAIServerError: when called, if an answer has no ids and log-probs.

    Examples:
        >>> policy = StockPolicy(StockServer("http://127.0.0.1:8000"), Sampling(max_tokens=8),
        ...     tokenizer=tokenizer, pad_token_id=0, eos_token_ids=(1,),
        ...     max_model_len=64)                                            # doctest: +SKIP
        >>> policy.generate_from_ids([[5, 6, 7]])["log_probs", "full"]       # doctest: +SKIP
    """

    def __init__(self, server: StockServer, sampling: Sampling, *, seeded: bool = True,
                 ignore_eos: bool = False, stop: Callable[[], None] | None = None,
                 **options: Any) -> None:
        super().__init__(server.url, sampling, model=server.model, api_key=server.token, **options)
        self.server, self.seeded, self.ignore_eos = server, seeded, ignore_eos
        self.stop = stop

    def close(self) -> None:
        super().close()
        if self.stop is not None:
            self.stop()

    def _row(self, prompt: list[int], row: int, deadline: float,
             given_up: threading.Event) -> Row:
        ask = self._of_sglang if self.server.kind == "sglang" else self._of_vllm
        stops = [] if self.ignore_eos else [*self.eos_token_ids]
        try:
            ids, log_probs, reason = ask(prompt, row, stops, deadline, given_up)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise OpenAIServerError(f"{self.server}: the answer has no sampled ids and log-probs "
                                    f"({error!r}), so nothing can be trained on it") from error
        if reason not in ("stop", "length") or None in log_probs or len(ids) != len(log_probs):
            raise OpenAIServerError(f"{self.server}: {len(ids)} ids and {len(log_probs)} log-probs "
                                    f"that ended by {reason!r} are no sample of the policy")
        return Row(ids, log_probs, reason == "length")

    def _of_vllm(self, prompt: list[int], row: int, stops: list[int], deadline: float,
                 given_up: threading.Event) -> tuple[list[int], list[float], str]:
        seed = {"seed": self.sampling.row_seed(self.calls, row)} if self.seeded else {}
        choice = self._call("POST", "/completions", {
            "model": self.server.adapter or self.server.model, "prompt": prompt, "n": 1,
            "max_tokens": self._limit(prompt), "temperature": float(self.sampling.temperature),
            "top_p": 1.0, "logprobs": 0, "stop_token_ids": stops, "ignore_eos": self.ignore_eos,
            **self._own, **seed}, deadline, given_up)["choices"][0]
        return choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["finish_reason"]

    def _of_sglang(self, prompt: list[int], row: int, stops: list[int], deadline: float,
                   given_up: threading.Event) -> tuple[list[int], list[float], str]:
        adapter = {} if self.server.adapter is None else {"lora_path": self.server.adapter}
        about = self._call("POST", f"{self.server.url}/generate", {
            "input_ids": prompt, "return_logprob": True, **adapter, "sampling_params": {
                "max_new_tokens": self._limit(prompt), "stop_token_ids": stops,
                "temperature": float(self.sampling.temperature), "ignore_eos": self.ignore_eos,
                "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}},
            deadline, given_up)["meta_info"]
        log_probs, ids = zip(*(entry[:2] for entry in about["output_token_logprobs"]), strict=True)
        return [*ids], [*log_probs], about["finish_reason"]["type"]
