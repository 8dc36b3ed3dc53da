"""Weights arrive while vLLM generates: each token was sampled by the weights that it names."""

from __future__ import annotations

import copy
from contextlib import ExitStack

import pytest
import torch

from grpo import data

from .asynchronous import LocalRay, async_config, make_async_trainer

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def test_at_group_borders_no_row_has_tokens_of_two_versions(tmp_path, model_folder, monkeypatch):
    pytest.importorskip("vllm")
    LocalRay(monkeypatch)
    config = async_config(
        model_folder, train={"staleness": 2, "total_dialog_turns": 6 * 8, "eval_frequency": 0,
                             "update_at": "group_border"},
        env={"num_envs": 2, "repeats": 4}, optimizer={"lr": 1e-3},
        inference_model={"backend": "vllm", "num_devices": 1, "max_tokens": 100,
                         "ignore_eos": True, "max_num_seqs": 12})
    ages = set()
    with ExitStack() as at_end:
        trainer = make_async_trainer(config, tmp_path, at_end)
        for _ in range(5):
            batch = trainer.collector.collect()
            versions_BT, mask_BT = batch[data.POLICY_VERSIONS], batch[data.ASSISTANT_MASK]
            assert all(len(row[mask].unique()) == 1 for row, mask in
                       zip(versions_BT, mask_BT, strict=True))
            ages |= set((trainer.weights.version - batch[data.POLICY_VERSION]).tolist())
            with torch.no_grad():
                for param in trainer.model.parameters():
                    param.add_(1e-3 * torch.randn_like(param))
            trainer.weights.publish()
            trainer.canary.check()
    assert len(ages) > 1  # updates came while groups were generated


def test_each_token_has_the_log_prob_of_the_weights_that_its_version_names(
        tmp_path, model_folder, monkeypatch):
    pytest.importorskip("vllm")
    LocalRay(monkeypatch)
    config = async_config(
        model_folder, train={"staleness": 2, "total_dialog_turns": 6 * 8, "eval_frequency": 0},
        env={"num_envs": 2, "repeats": 4}, optimizer={"lr": 1e-3},
        inference_model={"backend": "vllm", "num_devices": 1, "max_tokens": 100,
                         "ignore_eos": True, "max_num_seqs": 12})
    with ExitStack() as at_end:
        trainer = make_async_trainer(config, tmp_path, at_end)
        by_version, batches = {0: copy.deepcopy(trainer.model)}, []
        collect = trainer.collector.collect

        def remembering():
            batches.append(collect())
            return batches[-1]

        trainer.collector.collect = remembering
        for _ in range(5):
            metrics = trainer.iterate()
            assert metrics["policy/age_max"] <= 2
            by_version[trainer.weights.version] = copy.deepcopy(trainer.model)
        scorer = trainer.learner.loss.scorer
        mixed = 0
        for batch in batches:
            versions_BT, mask_BT = batch[data.POLICY_VERSIONS], batch[data.ASSISTANT_MASK]
            mixed += sum(len(row[mask].unique()) > 1 for row, mask in
                         zip(versions_BT, mask_BT, strict=True))
            for version in versions_BT[mask_BT].unique().tolist():
                scorer.model = by_version[version]
                with torch.no_grad():
                    log_probs_BT, _ = scorer(batch[data.TOKENS], batch[data.ATTENTION_MASK],
                                             mask_BT)
                dated_BT = mask_BT & (versions_BT == version)
                gap = (log_probs_BT - batch[data.LOG_PROBS])[dated_BT].abs().max()
                assert gap < 1e-4, f"tokens of version {version} are off by {gap}"
        assert mixed, "no update came while a row was generated"
