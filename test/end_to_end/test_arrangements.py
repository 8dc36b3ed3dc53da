"""``grpo.py`` with real vLLM in every arrangement of trainer and engine, one after the other."""

from __future__ import annotations

import pytest

from grpo.config.schema import load_config
from grpo.server.engine_process import EngineProcess, server_command

from ..config.configs import composed
from ..support import wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

TINY = ("model.warm_start_steps=20", "env.num_envs=8", "env.repeats=4",
        "train.total_dialog_turns=96", "train.eval_frequency=0", "train.checkpoint_frequency=2",
        "inference_model.backend=vllm", "env.reward=negative_length", "optimizer.lr=3e-3",
        "optimizer.schedule=constant", "inference_model.max_tokens=8")
LORA = ("train_model.lora.enabled=true", "train.kl_to_ref_coeff=0.01")
# Once, because a server takes most of a minute to start.
RESTART = ("inference_model.weight_sync=restart", "train.total_dialog_turns=32")
PROCESS, SERVER = "inference_model.engine=process", "inference_model.engine=server"
TWO = "train_model.num_devices=2"

ARRANGEMENTS = {
    "in process, adapters": LORA,
    "in process, adapters as views": (*LORA, "train_model.lora.alpha=16"),
    "in process, reload": ("inference_model.weight_sync=reload",),
    "process": (PROCESS,),
    "process, adapters": (PROCESS, *LORA),
    "process, reload": (PROCESS, "inference_model.weight_sync=reload"),
    "process, transfer": (PROCESS, "inference_model.weight_sync=transfer"),
    "server": (SERVER,),
    "server, adapters": (SERVER, *LORA),
    "server, reload": (SERVER, "inference_model.weight_sync=reload"),
    "server, transfer": (SERVER, "inference_model.weight_sync=transfer"),
    "server, restart": (SERVER, *RESTART),
    "server, restart with adapters": (SERVER, *LORA, *RESTART),
    "two ranks, a server": (SERVER, TWO),
    "two ranks, a server, adapters": (SERVER, TWO, *LORA),
    "devices for each role": (TWO, "ref_model.num_devices=2",
                              "inference_model.num_devices=2", "train.kl_to_ref_coeff=0.01"),
    "devices for engines, adapters": ("inference_model.num_devices=2", *LORA),
}


def check_run(runner, name: str, *, iterations: int = 3) -> list[dict]:
    """Every update reached the engine, and on-policy ratios are 1, which they are not for old
    weights."""
    rows = runner.metrics(runner.folder / "outputs" / name)[1:]
    assert [row["step"] for row in rows] == list(range(1, iterations + 1))
    for row in rows:
        assert row["canary/max_abs_diff"] < 1e-4
        assert row["policy/version"] == row["step"]
        assert row["policy/age_max"] == 0  # tokens are dated by the version that sampled them
        assert row["policy/ratio_min"] == pytest.approx(1, abs=1e-3)
        assert row["policy/ratio_max"] == pytest.approx(1, abs=1e-3)
        assert row["train/grad_norm"] > 0
    return rows


@pytest.mark.parametrize("name", ARRANGEMENTS)
def test_each_update_reaches_the_engine(runner, name):
    output = runner.run(*TINY, *ARRANGEMENTS[name], "hydra.run.dir=outputs/run")
    check_run(runner, "run", iterations=1 if RESTART[0] in ARRANGEMENTS[name] else 3)
    result = "final_adapter" if LORA[0] in ARRANGEMENTS[name] else "final_model"
    assert (runner.folder / "outputs" / "run" / result).is_dir() and result in output
    wait_until(lambda: not runner.left_behind(), seconds=10.0, every=0.1,
               said=lambda: str(runner.left_behind()))


@pytest.mark.parametrize("way", [LORA, ("inference_model.weight_sync=reload",)],
                         ids=["adapters", "reload"])
def test_a_run_with_a_server_goes_on_as_if_it_had_not_stopped(runner, way):
    options = (*TINY, SERVER, *way)
    runner.run(*options, "hydra.run.dir=outputs/whole")
    runner.run(*options, "train.total_dialog_turns=64", "hydra.run.dir=outputs/cut")
    runner.run(*options, "resume=outputs/cut")
    whole, cut = check_run(runner, "whole"), check_run(runner, "cut")
    for name in ("reward/mean", "policy/entropy", "tokens/response_mean"):
        assert cut[-1][name] == pytest.approx(whole[-1][name], abs=1e-4)


@pytest.mark.parametrize("way", [(), ("inference_model.weight_sync=transfer",),
                                 ("inference_model.weight_sync=reload",), (TWO,)],
                         ids=["single copy", "transfer", "reload", "two ranks"])
def test_a_server_that_runs_already_serves_one_run_after_another(runner, tmp_path, way,
                                                                 monkeypatch):
    """Whatever it was left with: the second run starts from other weights."""
    from grpo.run import build

    config = load_config(composed("grpo", *TINY))
    monkeypatch.setenv("XDG_CACHE_HOME", str(runner.cache))
    model = build.model_folder(config, build.build_task(config))
    command = server_command(model, dtype="float32", max_model_len=64, max_num_seqs=32,
                             kv_cache_memory_bytes=64 << 20)
    with EngineProcess(command, start_timeout=240, log_path=tmp_path / "server.log") as server:
        url = f"inference_model.url={server.url}"
        for name in ("one", "two"):
            runner.run(*TINY, SERVER, url, *way, f"hydra.run.dir=outputs/{name}")
            check_run(runner, name)
        assert server.client().info()["policy_version"] == 3
    one, two = (runner.metrics(runner.folder / "outputs" / name) for name in ("one", "two"))
    assert one[0]["eval/accuracy"] == two[0]["eval/accuracy"]
    assert one[-1]["reward/mean"] == pytest.approx(two[-1]["reward/mean"], abs=1e-4)
