"""A stand-in for a stock server: a Transformers model behind the routes that SGLang documents, or
those of vLLM that are asked for here. It is none of them; real vLLM is in test_stock_vllm.py."""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import torch
from transformers import AutoModelForCausalLM

ROUTES = {
    "sglang": {"/generate", "/update_weights_from_disk", "/load_lora_adapter",
               "/unload_lora_adapter"},
    "vllm": {"/v1/completions", "/collective_rpc", "/reset_prefix_cache", "/pause", "/resume",
             "/weight_checker", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"}}
FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj",
         "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}


class StandIn(ThreadingHTTPServer):
    """A context manager.

    Args:
        kind: whose routes it has.
        folder: of the model.
        without: routes that it does not have.
        deaf: says that it has taken up new weights, and keeps the old ones.
        raw: log-probs are those before the temperature.
    """

    daemon_threads = True

    def __init__(self, kind: str, folder: Path, *, without: set[str] = frozenset(),
                 deaf: bool = False, raw: bool = False) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.kind, self.routes, self.deaf, self.raw = kind, ROUTES[kind] - without, deaf, raw
        self.lock, self.bodies, self.adapters = threading.Lock(), [], {}
        self.answer: dict | None = None
        self.authorizations: set[str | None] = set()  # that requests came with
        self.context, self.most_at_a_time, self._now = 64, 0, 0
        self._load(folder)

    def _load(self, folder: str | Path) -> None:
        self.folder = str(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def __enter__(self) -> StandIn:
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def get(self, path: str) -> tuple[int, dict]:
        if path == "/v1/models":
            others = [{"id": name, "parent": "m", "owned_by": self.kind} for name in self.adapters]
            return 200, {"data": [*others, {
                "id": "m", "owned_by": self.kind, "max_model_len": self.context, "parent": None}]}
        if path == "/get_model_info" and self.kind == "sglang":
            return 200, {"model_path": self.folder}
        return (405 if path in self.routes else 404), {}

    def post(self, path: str, body: dict) -> tuple[int, dict]:
        if path not in self.routes:
            return 404, {}
        self.bodies.append((path, body))
        self._now += 1
        self.most_at_a_time = max(self.most_at_a_time, self._now)
        try:
            return self._answer(path, body)
        finally:
            self._now -= 1

    def _answer(self, path: str, body: dict) -> tuple[int, dict]:
        with self.lock, torch.no_grad():
            if path == "/generate":
                return 200, self.answer or self._generate(body)
            if path == "/v1/completions":
                return 200, self.answer or self._complete(body)
            if path in ("/update_weights_from_disk", "/collective_rpc"):
                folder = body.get("model_path") or body["kwargs"]["weights_path"]
                if self.deaf:
                    self.folder = folder
                else:
                    self._load(folder)
                return 200, {"success": True, "message": "", "results": [None]}
            if path.endswith("/load_lora_adapter"):
                self.adapters[body["lora_name"]] = body["lora_path"]
            elif path.endswith("/unload_lora_adapter"):
                del self.adapters[body["lora_name"]]
            elif path == "/weight_checker":
                return 200, {"checksums": {f"dp0:pp0:pcp0:tp0:{name}": digest
                                           for name, digest in self.digests().items()}}
            return 200, {"success": True}

    def digests(self) -> dict[str, str]:
        """Of vLLM's tensors: q, k and v are one, gate and up are one."""
        tensors: dict[str, list[torch.Tensor]] = {}
        for name, param in self.model.named_parameters():
            for part, fused in FUSED.items():
                name = name.replace(f".{part}.", f".{fused}.")
            tensors.setdefault(name, []).append(param)
        embedding = tensors["model.embed_tokens.weight"]
        padding = -embedding[0].shape[0] % 64
        embedding.append(torch.zeros(padding, embedding[0].shape[1]))
        return {name: hashlib.sha256(torch.cat(parts).numpy().tobytes()).hexdigest()
                for name, parts in tensors.items()}

    def _sample(self, prompt: list[int], limit: int, temperature: float, stops: list[int],
                seed: int | None) -> tuple[list[int], list[float], str]:
        tokens, log_probs = list(prompt), []
        random = torch.Generator().manual_seed(seed if seed is not None else len(self.bodies))
        for _ in range(limit):
            logits = self.model(torch.tensor([tokens])).logits[0, -1]
            scaled = (logits / (temperature or 1.0)).log_softmax(-1)
            token = int(scaled.argmax() if temperature == 0 else torch.multinomial(
                scaled.exp(), 1, generator=random))
            tokens.append(token)
            log_probs.append((logits.log_softmax(-1) if self.raw else scaled)[token].item())
            if token in stops:
                return tokens[len(prompt):], log_probs, "stop"
        return tokens[len(prompt):], log_probs, "length"

    def _generate(self, body: dict) -> dict:
        options = body["sampling_params"]
        ids, log_probs, reason = self._sample(
            body["input_ids"], options["max_new_tokens"], options["temperature"],
            options["stop_token_ids"], None)
        return {"text": "", "meta_info": {
            "finish_reason": {"type": reason}, "output_token_logprobs": [
                [log_prob, token, None] for log_prob, token in zip(log_probs, ids, strict=True)]}}

    def _complete(self, body: dict) -> dict:
        ids, log_probs, reason = self._sample(
            body["prompt"], body["max_tokens"], body["temperature"], body["stop_token_ids"],
            body.get("seed"))
        return {"choices": [{"text": "", "token_ids": ids, "finish_reason": reason,
                             "logprobs": {"token_logprobs": log_probs}}]}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.server.authorizations.add(self.headers["Authorization"])
        self._send(*self.server.get(urlsplit(self.path).path))

    def do_POST(self) -> None:
        self.server.authorizations.add(self.headers["Authorization"])
        body = json.loads(self.rfile.read(int(self.headers.get("content-length") or 0)) or b"{}")
        self._send(*self.server.post(urlsplit(self.path).path, body))

    def _send(self, status: int, value: dict) -> None:
        text = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)
