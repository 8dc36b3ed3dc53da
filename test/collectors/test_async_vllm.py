"""Weights arrive while vLLM generates: each token was sampled by the weights that it names."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch

from grpo import data
from grpo.run import build_async
from grpo.weights.canary import StaleWeightsError
from grpo.weights.fleet import FleetTransfer

from .asynchronous import LocalRay, async_config, make_async_trainer

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(params=["weights", "adapters", "adapters, two processes an engine"])
def configure(request, model_folder, monkeypatch):
    """The configuration of a run of long rows, by options of ``train``."""
    pytest.importorskip("vllm")
    LocalRay(monkeypatch)
    sections = {"optimizer": {"lr": 1e-3}}
    if request.param != "weights":
        pytest.importorskip("peft")
        sections = {"train_model": {"lora": {"enabled": True, "r": 4}}, "optimizer": {"lr": 1e-2}}
    if request.param.endswith("an engine"):
        whole = build_async.worker_setup  # two devices, of which a configuration says: on GPUs
        monkeypatch.setattr(build_async, "worker_setup",
                            lambda *args: replace(whole(*args), tensor_parallel_size=2))
    return lambda **train: async_config(
        model_folder, env={"num_envs": 2, "repeats": 4},
        train={"staleness": 2, "total_dialog_turns": 6 * 8, "eval_frequency": 0, **train},
        inference_model={"backend": "vllm", "num_devices": 1, "max_tokens": 100,
                         "ignore_eos": True, "max_num_seqs": 12}, **sections)


def test_at_group_borders_no_row_has_tokens_of_two_versions(tmp_path, configure):
    config = configure(update_at="group_border")
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
                for param in trainer.learner.optimizer.params:
                    param.add_(1e-3 * torch.randn_like(param))
            trainer.weights.publish()
            trainer.canary.check()
    assert len(ages) > 1  # updates came while groups were generated


def test_an_update_that_is_lost_ends_the_run_where_no_canary_sees_it(
        tmp_path, configure, monkeypatch):
    with ExitStack() as at_end:
        trainer = make_async_trainer(configure(staleness=1), tmp_path, at_end)
        trainer.learner.optimizer.peak_lr = 1e-7
        trainer._prove_start()
        assert trainer.weights.version == 0
        for _ in range(4):
            assert trainer.iterate()["canary/max_abs_diff"] < 1e-4
        if isinstance(trainer.weights, FleetTransfer):
            monkeypatch.setattr(trainer.weights.transfer._path, "send",
                                lambda tensors, deadline: list(tensors))
        else:
            monkeypatch.setattr(trainer.collector.pool.actors[0]._slot, "write",
                                lambda values: None)
        with pytest.raises(StaleWeightsError, match="differ to the bit"):
            for _ in range(2):  # workers are compared while they go on, until the next update
                trainer.iterate()


def test_each_token_has_the_log_prob_of_the_weights_that_its_version_names(tmp_path, configure):
    with ExitStack() as at_end:
        trainer = make_async_trainer(configure(), tmp_path, at_end)
        by_version, batches = {0: copy.deepcopy(trainer.model)}, []
        collect = trainer.collector.collect

        def remembering():
            batches.append(collect())
            return batches[-1]

        trainer.collector.collect = remembering
        for _ in range(5):
            metrics = trainer.iterate()
            assert metrics["policy/age_max"] <= 2 and metrics["async/groups_too_old"] == 0
            by_version[trainer.weights.version] = copy.deepcopy(trainer.model)
        scorer = trainer.learner.loss.scorer

        def gaps(batch, mask_BT, version):
            """Of the log-probs that weights give to what was sampled."""
            scorer.model = by_version[version]
            with torch.no_grad():
                log_probs_BT, _ = scorer(batch[data.TOKENS], batch[data.ATTENTION_MASK],
                                         batch[data.ASSISTANT_MASK])
            return (log_probs_BT - batch[data.LOG_PROBS])[mask_BT].abs()

        mixed = 0
        for batch in batches:
            versions_BT, mask_BT = batch[data.POLICY_VERSIONS], batch[data.ASSISTANT_MASK]
            mixed += sum(len(row[mask].unique()) > 1 for row, mask in
                         zip(versions_BT, mask_BT, strict=True))
            for version in versions_BT[mask_BT].unique().tolist():
                dated_BT = mask_BT & (versions_BT == version)
                gap = gaps(batch, dated_BT, version).max()
                assert gap < 1e-4, f"tokens of version {version} are off by {gap}"
                assert gaps(batch, dated_BT, version + 1).max() > 1e-3  # or it proves nothing
        assert mixed, "no update came while a row was generated"
