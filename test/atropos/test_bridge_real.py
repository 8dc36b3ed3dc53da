"""Unmodified environments of atroposlib, in their own interpreter, served by a bridge.

See ``test_examples.py`` for the interpreter.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo import data
from grpo.atropos.assemble import StreamSource
from grpo.atropos.client import AtroposClient
from grpo.atropos.hub_server import HubServer
from grpo.atropos.launcher import EnvironmentProcess, serve_flags
from grpo.atropos.recompute import RecomputeLogProbs
from grpo.atropos.stream import BatchStream
from grpo.envs.tokenizer_files import save_tokenizer
from grpo.objectives.scorer import TokenScorer

from .environments import DicePolicy, make_collector, serving
from .groups import registration

pytestmark = pytest.mark.slow  # atroposlib takes seconds to import, an environment ten to start

REPO = Path(__file__).resolve().parents[2]
GROUP = 4


@pytest.mark.parametrize("name", ["arithmetic", "two_turn", "chat"])
def test_what_an_environment_sends_is_matched_with_what_was_sampled(
        python, tokenizer, byte_model, tmp_path, name):
    save_tokenizer(tokenizer, tmp_path / "tokenizer")
    digits = [tokenizer.encode(digit)[0] for digit in "0123456789"]
    policy = DicePolicy(max_tokens=4, vocab=(min(digits), max(digits)))
    with serving(tokenizer) as (bridge, url), HubServer() as hub:
        flags = serve_flags(engine_url=url, model="policy", tokenizer=tmp_path / "tokenizer",
                            group_size=GROUP, ensure_scores_are_not_same=False)
        with BatchStream(AtroposClient(hub.url), registration(batch_size=12, max_token_len=512),
                         poll_seconds=0.05) as stream, EnvironmentProcess(
                    REPO / "examples" / "atropos" / f"{name}_env.py", python=python,
                    api_url=hub.url, flags=flags, log_path=tmp_path / "log",
                    env={"HF_HUB_OFFLINE": "1"}) as process:
            recompute = RecomputeLogProbs(TokenScorer(byte_model), max_tokens=4096)
            collector = make_collector(bridge, StreamSource(stream), policy, max_staleness=2,
                                       recompute=recompute, timeout=120.0)
            batches = [collector.collect() for _ in range(3)]
            process.check()
    said = {(prompt, tokens): values for prompt, tokens, values, _ in policy.said}
    turns = 0
    for batch in batches:
        assert batch[data.GROUP_ID].unique(return_counts=True)[1].tolist() == [GROUP] * 3
        assert batch[data.ROW_MASK].all() and not batch[data.LOG_PROBS].isnan().any()
        for i in range(len(batch)):
            tokens = batch[data.TOKENS][i].tolist()
            for (prompt, answer), values in said.items():
                answer = answer[:-1] if name == "chat" and answer[-1] == 1 else answer
                end = len(prompt) + len(answer)
                if answer and tuple(tokens[:end]) == prompt + answer:
                    row = batch[data.LOG_PROBS][i, len(prompt) : end].tolist()
                    turns += row == list(values[: len(answer)])
    counts = bridge.records.counts
    # Identical answers have several values, of which the last stays in `said`.
    assert turns >= 18
    if name == "chat":  # its template adds a line break that nobody sampled, also to empty answers
        empty = sum(int((batch[data.ASSISTANT_MASK].sum(-1) == 1).sum()) for batch in batches)
        assert counts["rows_unmatched"] == empty
        assert counts["rows_partly_matched"] == 36 - empty > 0
        assert 0 < recompute.metrics["atropos/recomputed_tokens"] < 0.5
    else:
        assert counts["rows_matched"] == 36
        assert counts["rows_partly_matched"] == counts["rows_unmatched"] == 0
        assert recompute.metrics["atropos/recomputed_tokens"] == 0
