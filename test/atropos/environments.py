"""Environments as a bridge meets them: clients that ask, score, and often give up.

They know nothing of the trainer: they speak HTTP to an inference server and put the groups that
they finish where a hub would.
"""

from __future__ import annotations

import queue
import random
import threading
from contextlib import contextmanager

import torch

from grpo.atropos.assemble import GroupAssembler
from grpo.atropos.bridge import Bridge
from grpo.atropos.bridge_driver import BridgeDriver
from grpo.atropos.bridge_server import BridgeServer
from grpo.atropos.collector import AtroposCollector
from grpo.atropos.convert import GroupConverter
from grpo.atropos.schemas import IGNORED, parse_group
from grpo.policies.base import Completions, Policy, Sampling
from grpo.policies.client import EngineClient
from grpo.policies.samplers import TransformersSampler

EOS = 1


class DicePolicy(Policy):
    """Random tokens with random log-probs; says what it said, to compare with."""

    def __init__(self, *, max_tokens=6, seed=0, vocab=(66, 90), **options):
        super().__init__(Sampling(max_tokens=max_tokens), pad_token_id=0, eos_token_ids=(EOS,),
                         max_model_len=512, **options)
        self.random, self.vocab = random.Random(seed), vocab
        self.said: list[tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...], int]] = []
        self.asked: list[tuple[float, int]] = []
        self.numbers: list[int] = []

    def _generate(self, prompts, on_row=None):
        out = Completions([], [], [])
        self.asked.append((self.sampling.temperature, self.sampling.max_tokens))
        self.numbers.append(torch.initial_seed())
        for prompt in prompts:
            size = self.random.randint(1, self.sampling.max_tokens)
            tokens = [self.random.randint(*self.vocab) for _ in range(size)]
            ended = size < self.sampling.max_tokens
            tokens = tokens[:-1] + [EOS] if ended else tokens
            values = [-self.random.randint(1, 4096) / 1024 for _ in tokens]
            self.said.append((tuple(prompt), tuple(tokens), tuple(values), self.version()))
            out.tokens.append(tokens)
            out.log_probs.append(values)
            out.truncated.append(not ended)
        return out


class Groups:
    """Where environments send what they have scored; a source for collectors."""

    def __init__(self):
        self.queue: queue.Queue = queue.Queue()

    def send(self, obj):
        self.queue.put(parse_group(obj))

    def __call__(self, timeout):
        try:
            return [self.queue.get(timeout=timeout) if timeout > 0 else self.queue.get_nowait()]
        except queue.Empty:
            return []


class Environment(threading.Thread):
    """Plays episodes until told to stop, or for a number of them.

    Args:
        url: of the inference server.
        groups: where scored groups go.
        seed: of everything it decides.
        with_log_probs: whether its groups have them; many environments send none.
        turns: greatest number of turns.
        score: of a row's trained tokens; None: random.
        dropped: share of groups that it drops, as for equal scores.
    """

    def __init__(self, url, groups, *, seed, episodes=None, with_log_probs=False, turns=3,
                 dropped=0.3, group_size=3, score=None):
        super().__init__(daemon=True)
        self.client = EngineClient(url, timeout=60)
        self.groups, self.random = groups, random.Random(seed)
        self.episodes, self.with_log_probs = episodes, with_log_probs
        self.turns, self.dropped, self.group_size = turns, dropped, group_size
        self.score = score or (lambda trained: self.random.random())
        self.stopped = threading.Event()
        self.errors: list[Exception] = []
        self.played = self.sent = 0
        self.seed = seed

    def run(self):
        try:
            while not self.stopped.is_set() and self.played != self.episodes:
                self.played += 1
                self.episode()
        except Exception as error:  # noqa: BLE001 - handed to the test
            if not self.stopped.is_set():
                self.errors.append(error)

    def prompt(self):
        return [10 + self.seed % 50] + [self.random.randint(10, 60)
                                        for _ in range(self.random.randint(1, 5))]

    def generate(self, prompt, n):
        out = self.client.call("POST", "/generate", {
            "prompt": {"prompt_token_ids": prompt}, "n": n, "max_tokens": 6, "logprobs": 0,
            "temperature": 1.0})
        tokens = [[int(next(iter(position[0]))) for position in of_sample]
                  for of_sample in out["logprobs"]]
        values = [[next(iter(position[0].values())) for position in of_sample]
                  for of_sample in out["logprobs"]]
        assert tokens == out["token_ids"]
        return tokens, values

    def evaluate(self):
        """A greedy call whose answer never comes back."""
        self.client.call("POST", "/generate", {
            "prompt": {"prompt_token_ids": self.prompt()}, "max_tokens": 2, "temperature": 0.0})

    def episode(self):
        if self.random.random() < 0.2:
            self.evaluate()
        first = self.prompt()
        answers, values = self.generate(first, self.group_size)
        rows = []
        for answer, of_answer in zip(answers, values, strict=True):
            tokens, masks = first + answer, [IGNORED] * len(first) + answer
            log_probs = [1.0] * len(first) + of_answer
            for _ in range(self.random.randint(0, self.turns - 1)):
                said = self.prompt()
                (answer,), (of_answer,) = self.generate(tokens + said, 1)
                tokens, masks = tokens + said + answer, masks + [IGNORED] * len(said) + answer
                log_probs = log_probs + [1.0] * len(said) + of_answer
            rows.append((tokens, masks, log_probs))
        if self.random.random() < self.dropped:
            return
        group = {"tokens": [row[0] for row in rows], "masks": [row[1] for row in rows],
                 "scores": [self.score([t for t in row[1] if t != IGNORED]) for row in rows]}
        if self.with_log_probs:
            group["inference_logprobs"] = [row[2] for row in rows]
        self.sent += 1
        self.groups.send(group)

    def stop(self):
        self.stopped.set()


def make_driver(bridge, policy=None, **options):
    return BridgeDriver(bridge, TransformersSampler(policy or DicePolicy()), **options)


def make_collector(bridge, source, policy, *, rows=12, version=lambda: 0, timeout=30.0,
                   recompute=None, **options):
    """The bridge form of a collector; ``options`` are those of the converter."""
    converter = GroupConverter(pad_token_id=0, temperature=1.0, **options)
    assembler = GroupAssembler(source, converter, rows=rows, version=version,
                               records=bridge.records)
    return AtroposCollector(assembler, driver=make_driver(bridge, policy), timeout=timeout,
                            recompute=recompute)


def post(client, path, **body):
    return client.call("POST", path, body)


@contextmanager
def serving(tokenizer, **options):
    """A bridge behind HTTP; yields it and the URL of its server."""
    server = {name: options.pop(name) for name in ("token", "host") if name in options}
    bridge = Bridge(**{"tokenizer": tokenizer, "eos_token_ids": (EOS,), "max_model_len": 512,
                       "vocab_size": len(tokenizer), "model_names": ("policy",),
                       "request_timeout": 60.0, **options})
    with BridgeServer(bridge, **server) as running:
        yield bridge, running.url


@contextmanager
def playing(environments):
    """Start environments; at the end stop them and look whether one failed."""
    for environment in environments:
        environment.start()
    try:
        yield environments
    finally:
        for environment in environments:
            environment.stop()
    for environment in environments:
        assert not environment.errors, environment.errors
