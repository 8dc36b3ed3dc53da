"""On-policy ratios are 1 for every causal class of Transformers, in whatever is not refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from tensordict import TensorDict

from grpo.objectives import GRPOLoss, total_loss
from grpo.run.build_model import switch_dropout_off

from .causal_classes import NOT_TRIED, VOCABULARY, make_class, names

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
HEADS = ("auto", "fused", "chunked", "logits")
PROMPTS, LENGTHS = (2, 1, 4), (11, 6, 9)


class Outcome(NamedTuple):
    """What a class can do: heads and packings with ratios of 1, and what was refused why."""

    works: set[tuple[str, bool]]
    refused: dict[tuple[str, bool], str]
    tiles: bool


def batch_of(model) -> TensorDict:
    """Random rows whose sampling log-probs are the model's own, row by row without padding."""
    generator = torch.Generator().manual_seed(7)
    B, T = len(LENGTHS), max(LENGTHS)
    tokens = torch.zeros(B, T, dtype=torch.int64)
    log_probs = torch.zeros(B, T)
    columns = torch.arange(T)
    attention = columns < torch.tensor(LENGTHS)[:, None]
    for b, length in enumerate(LENGTHS):
        tokens[b, :length] = torch.randint(5, VOCABULARY, (length,), generator=generator)
        with torch.no_grad():
            logits = model(input_ids=tokens[b : b + 1, :length]).logits[0, :-1]
        rows = logits.float().log_softmax(-1)
        log_probs[b, 1:length] = rows.gather(-1, tokens[b, 1:length, None])[:, 0]
    assistant = attention & (columns >= torch.tensor(PROMPTS)[:, None])
    return TensorDict({
        "tokens": {"full": tokens}, "log_probs": {"full": log_probs * assistant},
        "masks": {"all_attention_mask": attention, "all_assistant_mask": assistant},
        "advantage": torch.tensor([[1.0], [-0.5], [0.7]])}, batch_size=[B])


def try_class(name: str, **options) -> Outcome:
    """Ratios of a class in every head and packing; those past 1e-4 are an error."""
    model = make_class(name, **options).eval()
    batch = batch_of(model)
    model.train()
    switch_dropout_off(model)
    works, refused = set(), {}
    for packing in (False, True):
        for head in HEADS:
            try:
                loss = GRPOLoss(model, head=head, packing=packing)
                loss.scorer.measure()
            except ValueError as error:
                refused[head, packing] = str(error)
                continue
            out = loss(batch)
            extremes = out["ratio_min"].item(), out["ratio_max"].item()
            assert all(abs(ratio - 1) < 1e-4 for ratio in extremes), (name, head, packing, extremes)
            total_loss(out).backward()
            works.add((head, packing))
    tiles = ("chunked", False) in works
    assert tiles == (("fused", False) in works)
    return Outcome(works, refused, tiles)


@pytest.mark.parametrize(("name", "tiles", "packs"), [
    ("llama", True, True), ("gpt2", True, True), ("gemma3_text", True, True),
    ("gemma2", False, True), ("gemma4", False, True), ("falcon_h1", False, False),
    ("mamba", True, False), ("qwen3_5_text", True, False), ("recurrent_gemma", False, False),
    ("bloom", True, False), ("llama4_text", False, False)])
def test_ratios_are_one_or_refused(name, tiles, packs):
    outcome = try_class(name)
    assert outcome.works == {(head, packing) for head in HEADS for packing in (False, True)
                             if (tiles or head in ("auto", "logits")) and (packs or not packing)}
    for (head, _), reason in outcome.refused.items():
        own = tiles or head in ("auto", "logits")
        assert re.search("set packing=False" if own else f"head='{head}'.*use head='auto'", reason)


@pytest.mark.parametrize("name", ["prophetnet", "xlnet"])
def test_what_is_no_prediction_is_refused(name):
    outcome = try_class(name)
    assert not outcome.works
    assert "sees the tokens that it should predict" in outcome.refused["auto", False]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_causal_class():
    found: dict[tuple[str, str], set[str]] = {}
    for name in names():
        outcome = try_class(name)
        assert {("auto", False), ("logits", False)} <= outcome.works or not outcome.works, (
            name, outcome.refused)
        head = "tiles" if outcome.tiles else "own logits" if outcome.works else "refused"
        packs = "yes" if ("auto", True) in outcome.works else "refused"
        found.setdefault((head, packs), set()).add(name)
    table = "\n".join(f"| {head} | {packs} | {', '.join(sorted(types))} |"
                      for (head, packs), types in sorted(found.items(), reverse=True))
    print(table)
    assert sum(map(len, found.values())) >= 60
    written = {(head, packs): set(types.split(", ")) for head, packs, types in re.findall(
        r"^\| (tiles|own logits|refused) \| (yes|refused) \| (.+) \|$", GUIDE.read_text(), re.M)}
    assert written == found, f"the table of docs/models.md should be\n{table}"


def test_the_guide_names_what_is_not_tried():
    text = GUIDE.read_text()
    for reason, types in NOT_TRIED.items():
        assert f"{reason}: {', '.join(sorted(types))}" in re.sub(r"\s+", " ", text)
