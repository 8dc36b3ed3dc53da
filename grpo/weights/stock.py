"""New weights for a server of vLLM or SGLang that is not of this library, by what it offers.

vLLM started with ``VLLM_SERVER_DEV_MODE=1``, and SGLang, read a checkpoint that they are told of;
with ``VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 --enable-lora``, or SGLang's ``--enable-lora``, adapters.
The server must see the run's folder under the same path. Where it tells hashes of its tensors they
are compared to the bit; else, and of what it has packed, the canary's log-probs are the proof.
"""

from __future__ import annotations

import hashlib
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from grpo.config.keys import ConfigError
from grpo.policies.stock_server import PACKED, StockServer
from grpo.system.threads import in_background
from grpo.weights.adapters import adapters, load_adapter_tensors, save_adapter, whole_adapters
from grpo.weights.channel import Deadline
from grpo.weights.fingerprint import ALL, Part
from grpo.weights.gather import Tell, tell_nobody
from grpo.weights.layout import FUSED, base_parameters
from grpo.weights.reload import CheckpointSync
from grpo.weights.shared import WeightSync
from grpo.weights.worker.lora import flat

_VOCABULARY, _BLOCK = ("embed_tokens.weight", "lm_head.weight"), 64


class StockReload(CheckpointSync):
    """The server reads each checkpoint into the memory that its weights have.

    Args:
        model: the trainer's, on one device.
        tokenizer: saved beside the model.
        server: that must see ``folder`` under the same path.
        folder: for the checkpoints, of which the newest stays.
        timeout: seconds for one update.
        version: updates published before.

    Raises:
        ConfigError: for a server of which it is known that it would keep a tied head as it was.
    """

    def __init__(self, model: nn.Module, tokenizer: Any, server: StockServer,
                 folder: str | Path, *, timeout: float = 600.0, version: int = 0) -> None:
        super().__init__(model, tokenizer, folder, engine=None, timeout=timeout, version=version)
        self.server = server
        if PACKED in server.digests().values() and model.config.tie_word_embeddings:
            raise ConfigError(
                f"inference_model.url={server.url}: vLLM packs the weights of linear layers there, "
                "as it does on CPUs, and a head that is tied to the embedding keeps its old values "
                "when it reads a checkpoint. Train adapters: train_model.lora.enabled=true, with a "
                "server started with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora; or use "
                "a server of this library, python -m grpo.server.serve")

    def _serve(self, path: Path, version: int, deadline: Deadline) -> None:
        waiting_for = f"{self.server} to read {path}"
        deadline.result(in_background(self.server.read_checkpoint, path,
                                      timeout=deadline.left(waiting_for)), waiting_for)

    def differing(self, part: Part = ALL) -> list[str]:
        """Tensors whose hash at the server is not the trainer's; see the module."""
        theirs = self.server.digests()
        params = base_parameters(self.model)
        known = sorted(name for name, digest in theirs.items() if digest != PACKED)
        return [name for name in part.choose(known)
                if (ours := _digest(name, params)) is not None and ours != theirs[name]]


class StockLoRA(WeightSync):
    """The server reads each version of the adapter under a name of its own, so that nothing it has
    cached of an older one is taken for the new one's; the old one is unloaded.

    Args:
        model: with adapters, see :func:`~grpo.weights.adapters.make_lora`.
        server: that serves the same base weights, and must see ``folder`` under the same path.
        folder: for the adapters on their way, of which the newest stays.
        timeout: seconds for one update.
        version: updates published before.
        tell: the other ranks of a sharded trainer to gather.
    """

    def __init__(self, model: nn.Module, server: StockServer, folder: str | Path, *,
                 timeout: float = 120.0, version: int = 0, tell: Tell = tell_nobody) -> None:
        adapters(model)  # raises if there are none
        self.model, self.server, self.folder = model, server, Path(folder).absolute()
        self.timeout, self.version, self.tell = timeout, version, tell
        self._run, self._loads = f"grpo-{secrets.token_hex(4)}", 0
        self.saved: Path | None = None

    def publish(self, *, now: bool = False) -> int:
        """Save the adapter and have requests ask for it; the version counts once it is loaded."""
        with self.tell("adapters"):
            gathered = whole_adapters(self.model)
        self._loads += 1
        path = save_adapter(self.model, self.folder / f"adapter_{self._loads}", gathered)
        older, folder = self.server.adapter, self.saved
        self.server.load_adapter(f"{self._run}-{self._loads}", path, timeout=self.timeout)
        self.version, self.saved = self.version + 1, path
        if folder is not None:
            self.server.unload_adapter(older)
            shutil.rmtree(folder, ignore_errors=True)
        return self.version

    def differing(self, part: Part = ALL) -> list[str]:
        """Factors that differ in the folder which the server has read last."""
        with self.tell("adapters"):
            gathered = whole_adapters(self.model)
        ours = flat({name: adapter.factors() for name, adapter in gathered.items()})
        read = flat(load_adapter_tensors(self.saved))
        return [name for name, value in part.choose(ours.items())
                if not torch.equal(value.detach().cpu(), read[name])]

    def close(self) -> None:
        """Leave the server as it was found."""
        if self.saved is not None:
            self.server.unload_adapter(self.server.adapter)
            self.server.adapter = self.saved = None


def _digest(name: str, params: dict[str, Tensor]) -> str | None:
    """Hash of what vLLM's tensor ``name`` should hold; None where that is not known."""
    parts = [params[part] for part in _parts(name, params) if part in params]
    if not parts:
        return None
    sha = hashlib.sha256()
    for tensor in parts:
        sha.update(_bytes(tensor.detach()))
    if name.endswith(_VOCABULARY) and (missing := -parts[0].shape[0] % _BLOCK):
        sha.update(_bytes(parts[0].new_zeros(missing, parts[0].shape[1])))
    return sha.hexdigest()


def _parts(name: str, params: dict[str, Tensor]) -> Iterator[str]:
    """Hugging Face's names of what lies in one of vLLM's tensors, in order."""
    path, _, kind = name.rpartition(".")
    prefix, _, module = path.rpartition(".")
    if name in params or module not in FUSED:
        yield name
    else:
        yield from (f"{prefix}.{part}.{kind}" for part in FUSED[module])


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data
