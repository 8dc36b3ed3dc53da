"""Stand-ins for HTTP servers; that of an engine answers every second sample of an addition rightly.
"""

from __future__ import annotations

import json
import random
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

LOG_PROB = -0.25


def answers(prompt: str, count: int) -> list[str]:
    """The sum of the prompt's last addition and wrong ones in turn, in a random order."""
    a, b = re.findall(r"(\d+)\+(\d+)=", prompt)[-1] if "=" in prompt else ("1", "1")
    texts = [f"{int(a) + int(b) + 7 * (i % 2):02d}" for i in range(count)]
    if count == 1 and random.random() < 0.5:
        texts = ["7"]
    return random.sample(texts, count)


class JsonHandler(BaseHTTPRequestHandler):
    """Reads and writes JSON, and logs nothing."""

    def body(self):
        return json.loads(self.rfile.read(int(self.headers["Content-Length"])))

    def reply(self, value, *, status=200):
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


@contextmanager
def running(handler, port: int = 0):
    """The address of a server of this handler."""
    server = ThreadingHTTPServer(("127.0.0.1", port), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Handler(JsonHandler):
    tokenizer = None
    requests: list[tuple[str, dict]] = []

    def do_GET(self):
        self.reply({})

    def do_POST(self):
        body = self.body()
        self.requests.append((self.path, body))
        self.reply({"/generate": self.generate, "/v1/completions": self.complete,
                    "/v1/chat/completions": self.chat}[self.path](body, body.get("n") or 1))

    def generate(self, body, n):
        prompt = self.tokenizer.decode(body["prompt"]["prompt_token_ids"])
        outputs = [self.tokenizer(text)["input_ids"] + [self.tokenizer.eos_token_id]
                   for text in answers(prompt, n)]
        return {"logprobs": [[[{str(token): LOG_PROB}] for token in row] for row in outputs],
                "finish_reasons": ["stop"] * n}

    def complete(self, body, n):
        return {"id": "1", "created": 1, "model": body["model"], "object": "text_completion",
                "choices": [{"index": i, "text": text, "finish_reason": "stop"}
                            for i, text in enumerate(answers(body["prompt"], n))]}

    def chat(self, body, n):
        texts = answers(body["messages"][-1]["content"], n)
        return {"id": "1", "created": 1, "model": body["model"], "object": "chat.completion",
                "choices": [{"index": i, "finish_reason": "stop",
                             "message": {"role": "assistant", "content": text}}
                            for i, text in enumerate(texts)]}


@contextmanager
def inference_server(tokenizer, port: int = 0):
    """Its address and the list of ``(path, body)`` that it is asked."""
    handler = type("Handler", (Handler,), {"tokenizer": tokenizer, "requests": []})
    with running(handler, port) as url:
        yield url, handler.requests
