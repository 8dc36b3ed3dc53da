"""What tests of the real server share: expected log-probs, and requests that an update meets."""

from __future__ import annotations

import http.client
import json
import threading

import torch

from ..support import wait_until

PROMPT = list(range(10, 26))
LENGTH = 600  # of responses that an update meets on the way


def load(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def log_probs(model, prompt, tokens, *, temperature=1.0):
    """Log-probs of ``tokens`` after ``prompt`` by Transformers; ``model`` may be a folder."""
    model = load(model) if isinstance(model, str) else model
    ids = torch.tensor([prompt + tokens])
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]


def close(ours, theirs):
    return (torch.tensor(ours) - theirs).abs().max() < 1e-4


def check_follows(client, model, *, version):
    """The engine samples with the trainer's present weights, and says so."""
    prompts = [PROMPT, PROMPT * 9]  # the second fills a block of the prefix cache
    for prompt, answer in zip(prompts, client.generate(prompts, max_tokens=12, n=2), strict=True):
        for tokens, values in zip(answer.tokens, answer.log_probs, strict=True):
            assert close(values, log_probs(model, prompt, tokens))
        assert answer.versions == [[[version, len(tokens)]] for tokens in answer.tokens]


class InFlight:
    """A long request in a thread; begun, when this returns, and far from its end."""

    def __init__(self, client, *, stream=False, size=LENGTH, n=2):
        self.stream, self.n = stream, n
        self.connection = http.client.HTTPConnection(client.host, client.port, timeout=60)
        self.connection.request("POST", "/generate", json.dumps({
            "prompt": PROMPT, "max_tokens": size, "n": n, "ignore_eos": True, "logprobs": 0,
            "flat_logprobs": True, "stream": stream, "return_text": False}))
        wait_until(lambda: client.info()["open_requests"])
        # Sampled in the same steps: when this one has its tokens, the other has some, too.
        client.generate([[5]], max_tokens=3, ignore_eos=True)
        self.thread = threading.Thread(target=self._read)
        self.thread.start()

    def _read(self):
        self.lines = [json.loads(line) for line in self.connection.getresponse().read().split(b"\n")
                      if line]

    def samples(self):
        """Tokens, log-probs, the version of each token and the finish reason, of each sample."""
        self.thread.join(60)
        self.connection.close()
        if not self.stream:
            (answer,) = self.lines
            samples = zip(answer["token_ids"], answer["logprobs"], answer["policy_version"],
                          answer["finish_reasons"], strict=True)
        else:
            samples = []
            for index in range(self.n):
                mine = [line for line in self.lines if line["index"] == index]
                samples.append((*([x for line in mine for x in line[key]] for key in
                                  ("token_ids", "logprobs", "policy_version")),
                                mine[-1]["finish_reason"]))
        return [(tokens, values, [version for version, count in spans for _ in range(count)], end)
                for tokens, values, spans, end in samples]
