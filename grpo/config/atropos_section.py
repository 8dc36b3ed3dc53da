"""Section ``atropos`` of the configuration, which commands look at before PyTorch is imported."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator

from grpo.config.section import Section, server_address
from grpo.config.unread import Unread

EVALUATED = Unread(lambda c: not c.atropos.evaluate,
                   "without atropos.evaluate=true (--eval-task); set that, or")
_RESTART = Unread(lambda c: c.inference_model.weight_sync != "restart", "by inference_model."
                  "weight_sync={inference_model.weight_sync}; use restart, or")
_BRIDGE = Unread(lambda c: not c.atropos.bridge, "because only the bridge knows the version that "
                 "sampled each token (groups do not say it); set atropos.bridge=true, or")
_SERVER = Unread(lambda c: c.atropos.bridge,
                 "with atropos.bridge=true, where there is no engine server;")


class AtroposSection(Section):
    """Where groups come from, how many make a step, and what the run leaves behind."""

    url: Annotated[str, server_address("atropos")] = "http://127.0.0.1:8000"
    """Of the API: a hub, or atroposlib's ``run-api``."""
    steps: int = Field(10, ge=1)
    batch_size: int = Field(2, ge=1)
    """Sequences of a micro-batch; ``train.gradient_accumulation_steps`` times as many make a
    step."""
    seq_len: int = Field(2048, ge=2)
    """Longer sequences are cut."""
    timeout: float = Field(600.0, gt=0)
    """Seconds without a new group after which the run gives up."""
    bridge: bool = False
    """Answer the environments' requests with the policy of this process."""
    max_staleness: Annotated[int | None, _BRIDGE] = Field(None, ge=0)
    """Tokens sampled more than so many updates ago are not trained, which strikes long sequences
    most; null: all are."""
    restart_interval: Annotated[int | None, _RESTART] = Field(None, ge=1)
    """Steps between two engines, where each update starts a new one; null: 1. An evaluation that
    is due in between starts one, too, so that it is of its step's model."""
    vllm_port: int = Field(9001, ge=1, le=65535)
    forward_ports: list[int] = Field(default_factory=list)
    """Further ports of this machine that lead to the engine, for environments that ask there
    whatever they are told."""
    vllm_gpu: Annotated[int | None, _SERVER] = Field(None, ge=0)
    """GPU of the engine; null: the trainer's."""
    bridge_config: Annotated[str | None, _SERVER] = None
    """``vllm_bridge_config.json`` of the engine that is to be used; null: the engine that answers
    at the port, else one that is started here."""
    save_path: str = "trained_model_checkpoints"
    log_dir: str = "logs"
    evaluate: bool = False
    """Measure the accuracy on the test problems of the task of section ``env``."""
    eval_max_tokens: Annotated[int | None, EVALUATED] = Field(None, ge=1)
    """Longest answer of an evaluation; null: 128."""
    dump_batch: bool = False
    """Write each batch to ``temp.json`` in ``save_path``."""
    debug_loading: bool = False
    """Show where each parameter lies, and what the engine logs."""
    benchmark: bool = False
    """Summarise at the end where the time went."""

    @field_validator("forward_ports")
    @classmethod
    def _are_ports(cls, ports: list[int]) -> list[int]:
        for port in ports:
            if not 1 <= port <= 65535:
                raise ValueError(f"atropos.forward_ports has {port}, which is no port; give such "
                                 "as 9004,9005,9006,9007")
        return ports
