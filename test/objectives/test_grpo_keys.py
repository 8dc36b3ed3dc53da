"""The keys of ``GRPOLoss``: what it reads and returns, under which name, and what is missing."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields

import pytest
import torch
from torchrl.objectives import llm

from grpo import GRPOLoss, total_loss

from ..support import REPO
from .batches import LISTWISE, gradient, with_every_entry


class TestKeys:
    def test_out_keys_are_the_losses_that_are_returned(self, model, batch):
        for options in ({}, {"kl_to_ref_coeff": 0.0}, {"kl_to_inference_coeff": 0.1},
                        {"entropy_coeff": 0.1, "kl_to_ref_coeff": 0.1},
                        {"entropy_coeff": 0.1, "distill_coeff": 0.1, "head": "chunked"}, LISTWISE,
                        {"entropy_coeff": 0.0, "kl_to_inference_coeff": 0.1, "head": "logits"}):
            loss = GRPOLoss(model, **options)
            out = loss(batch)
            assert [key for key in out.keys() if key.startswith("loss_")] == loss.out_keys
            assert total_loss(out) == sum(out[key] for key in loss.out_keys)

    @pytest.mark.parametrize(("options", "more"), [
        ({}, set()), ({"proximal": "current"}, set()),
        ({"kl_to_ref_coeff": 0.1}, {("next", "ref_log_probs", "full")}),
        ({"proximal": "scored"}, {("log_probs", "proximal")}),
        ({"high_entropy_only": True}, {("masks", "high_entropy")}),
        ({"aggregation": "prompt"}, {"group_id"}),
        ({"distill_coeff": 0.1}, {("distill", "token_ids"), ("distill", "log_probs")}),
        (LISTWISE, {"group_id", "listwise_weight"}),
    ], ids=lambda value: str(sorted(value, key=str)))
    def test_in_keys_suffice(self, model, batch, options, more):
        loss = GRPOLoss(model, **options)
        assert set(loss.in_keys) - set(GRPOLoss(model).in_keys) == more
        only = batch.select(*loss.in_keys)
        assert len(list(only.keys(True, True))) == len(loss.in_keys)
        assert torch.equal(gradient(loss, only), gradient(loss, batch))

    @pytest.mark.parametrize(("name", "key"), [
        ("advantage", "advantage"),
        ("tokens", ("tokens", "full")),
        ("attention_mask", ("masks", "all_attention_mask")),
        ("assistant_mask", ("masks", "all_assistant_mask")),
        ("sample_log_prob", ("log_probs", "full")),
        ("ref_log_probs", ("next", "ref_log_probs", "full")),
        ("proximal_log_probs", ("log_probs", "proximal")),
        ("reward_error", ("next", "reward_error")),
        ("row_mask", "row_mask"),
        ("group_id", "group_id"),
    ])
    def test_set_keys_reads_the_renamed_entry_alone(self, model, make_batch, name, key):
        batch = with_every_entry(make_batch(model, error_rows=(0,)))
        batch["row_mask"] = torch.tensor([[True], [True], [False], [True]])
        loss = GRPOLoss(model, kl_to_ref_coeff=0.1, kl_to_inference_coeff=0.1, proximal="scored",
                        aggregation="prompt")
        expected = gradient(loss, batch)
        loss.set_keys(**{name: ("mine", "x")})
        renamed = batch.copy()
        renamed["mine", "x"] = batch[key]
        renamed[key] = torch.zeros_like(batch[key])  # a decoy under the usual name
        before = sorted(map(str, renamed.keys(True, True)))
        assert torch.equal(gradient(loss, renamed), expected)
        assert sorted(map(str, renamed.keys(True, True))) == before

    def test_set_keys_for_rewards_and_groups(self, model, batch):
        batch = batch.exclude("advantage")
        expected = gradient(GRPOLoss(model), batch)
        loss = GRPOLoss(model)
        loss.set_keys(reward="score", group_id="prompt_index")
        batch["score"] = batch["next", "reward"]
        batch["prompt_index"] = batch["group_id"]
        assert torch.equal(gradient(loss, batch.exclude(("next", "reward"), "group_id")), expected)

    def test_set_keys_refuses_an_unknown_name(self, model):
        with pytest.raises(ValueError, match="value"):
            GRPOLoss(model).set_keys(value="state_value")

    @pytest.mark.parametrize(("options", "key", "fix"), [
        ({}, ("masks", "all_attention_mask"), "policy"),
        ({}, ("masks", "all_assistant_mask"), "policy"),
        ({}, ("log_probs", "full"), "log-probs on"),
        ({"kl_to_ref_coeff": 0.1}, ("next", "ref_log_probs", "full"), "kl_to_ref_coeff=None"),
        ({"proximal": "scored"}, ("log_probs", "proximal"), "ProximalScorer"),
        ({"high_entropy_only": True}, ("masks", "high_entropy"), "ProximalScorer"),
        ({"aggregation": "prompt"}, "group_id", "another aggregation"),
        ({"distill_coeff": 0.1}, ("distill", "token_ids"), "distill_coeff=None"),
        ({"distill_coeff": 0.1}, ("distill", "log_probs"), "distill_coeff=None"),
        (LISTWISE, "listwise_weight", "MaxEntWeights"),
    ])
    def test_a_missing_entry_is_named_with_the_fix(self, model, batch, options, key, fix):
        loss = GRPOLoss(model, **options)
        for read in (loss, loss.normalizer):
            with pytest.raises(KeyError) as error:
                read(batch.exclude(key))
            assert str(key) in str(error.value) and fix in str(error.value)

    def test_a_missing_renamed_entry_is_not_replaced_by_the_usual_one(self, model, batch):
        for name in ("sample_log_prob", "advantage"):
            loss = GRPOLoss(model)
            loss.set_keys(**{name: "mine"})
            with pytest.raises(KeyError, match="mine"):
                loss(batch.exclude(("next", "reward")))

    def test_missing_tokens(self, model, batch):
        with pytest.raises(KeyError, match="'tokens'"):
            GRPOLoss(model)(batch.exclude(("tokens", "full")))

    def test_missing_advantages_cannot_be_made_from_a_part_of_the_batch(self, model, batch):
        loss, bare = GRPOLoss(model), batch.exclude("advantage")
        with pytest.raises(KeyError, match="GroupAdvantage"):
            loss(bare[:2], normalizer=loss.normalizer(bare))
        with pytest.raises(KeyError, match="GroupAdvantage"):
            loss(bare.exclude("group_id"))

    @pytest.mark.parametrize("width", [0, 2, 9])
    def test_a_wrong_advantage_shape_is_an_error(self, model, batch, width):
        wrong = batch.copy()
        wrong["advantage"] = torch.ones(len(batch), width)
        with pytest.raises(ValueError, match="advantage"):
            GRPOLoss(model)(wrong)


def names_of(loss: type) -> dict[str, set[str]]:
    """Of a loss: its arguments, and the names of its tensors."""
    arguments = inspect.signature(loss.__init__).parameters.keys() - {"self", "kwargs"}
    return {"argument": set(arguments), "key": {key.name for key in fields(loss._AcceptedKeys)}}


class TestNamesInTorchRL:
    """The tables of docs/objectives.md have all of TorchRL's names, and names that we have."""

    PAGE = (REPO / "docs" / "objectives.md").read_text()

    def rows(self, what: str) -> dict[str, str]:
        [table] = re.findall(rf"\| {what} there \| here \|\n\|---\|---\|\n((?:\|.*\n)+)", self.PAGE)
        return dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", table, re.MULTILINE))

    @pytest.mark.parametrize("what", ["argument", "key"])
    def test_every_name_of_the_loss_is_in_the_table(self, what):
        rows = self.rows(what)
        assert rows.keys() == names_of(llm.GRPOLoss)[what]
        for answer in rows.values():
            assert answer.startswith("none: ") or (
                re.match(r"`(\w+)`", answer)[1] in names_of(GRPOLoss)[what])

    def test_every_output_of_the_loss_is_in_the_table(self, model, batch):
        rows = self.rows("output")
        assert rows.keys() == set(llm.GRPOLoss().out_keys)
        out = GRPOLoss(model, kl_to_ref_coeff=0.1, kl_to_inference_coeff=0.1,
                       entropy_coeff=0.1)(batch)
        assert {re.match(r"`(\w+)`", answer)[1] for answer in rows.values()} <= set(out.keys())
