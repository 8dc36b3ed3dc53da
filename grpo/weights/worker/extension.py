"""What a vLLM worker can do with its weights, called by name from other processes.

vLLM mixes the class into its worker
(``worker_extension_cls="grpo.weights.worker.extension.WeightWorker"``) after importing this module
and before it loads the model. Arguments and results are JSON values: calls need no pickle and no
``VLLM_ALLOW_INSECURE_SERIALIZATION``. Works with vLLM 0.25.1 and 0.32.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo.policies.unpacked import keep_weights_unpacked
from grpo.system.lifeline import leave_interrupts_to_parent
from grpo.weights.fingerprint import fingerprints
from grpo.weights.handover import export_tensors
from grpo.weights.layout import base_parameters, without_adapters
from grpo.weights.worker.layer_outputs import LayerMethods
from grpo.weights.worker.lora import LoRAMethods
from grpo.weights.worker.receiver import TransferMethods

if "vllm" in sys.modules:  # a vLLM worker imports this module; others only look at it
    keep_weights_unpacked()
    leave_interrupts_to_parent()


class WeightWorker(TransferMethods, LoRAMethods, LayerMethods):
    """The extension class: everything a worker can be asked about its weights."""

    _exported_weights: dict[str, Any] | None = None

    def export_weights(self) -> dict[str, Any]:
        """Make the weights mappable by one other process; returns ``Handover.to_dict()``."""
        params = self._weights()
        # A second trainer of the same shared file needs no second file; CUDA counts its users.
        if self._exported_weights is None or self._exported_weights["kind"] == "cuda_ipc":
            self._exported_weights = export_tensors(
                params, model=self.model_config.model, owner="engine",
                tensor_parallel_size=self.parallel_config.tensor_parallel_size).to_dict()
        return self._exported_weights

    def fingerprints(self, names: list[str] | None = None) -> dict[str, str]:
        """Hash of the bytes of some engine tensors, or of all."""
        params = self._weights()
        if unknown := sorted(set(names or ()) - params.keys()):
            raise ValueError(f"the engine has no tensors called {', '.join(unknown)}")
        names = list(params) if names is None else names
        return dict(zip(names, fingerprints(params[name] for name in names), strict=True))

    def load_checkpoint(self, folder: str) -> int:
        """Overwrite the weights, in place, with the ``*.safetensors`` files of a folder.

        Returns:
            Number of engine tensors written.

        Raises:
            ValueError: without such files, or if they leave engine tensors unwritten.
            RuntimeError: for a quantised engine, and if the model replaced a tensor.
        """
        files = sorted(Path(folder).glob("*.safetensors"))
        if not files:
            raise ValueError(f"{folder} has no *.safetensors file; save the model with "
                             "save_pretrained(folder)")
        if self.model_config.quantization is not None:
            raise RuntimeError(f"the engine is quantised ({self.model_config.quantization}), so "
                               "its tensors do not have the checkpoint's form; restart it instead")
        addresses = {name: param.data_ptr() for name, param in self._weights().items()}
        model = self.model_runner.get_model()
        with torch.no_grad(), without_adapters(model):
            written = model.load_weights(_tensors_of(files))
        self.synchronize()
        now = {name: param.data_ptr() for name, param in self._weights().items()}
        if moved := [name for name in addresses if now.get(name) != addresses[name]]:
            raise RuntimeError(f"loading replaced the memory of {', '.join(moved[:5])}: graphs and "
                               "trainers that hold the old memory would not see updates")
        if missing := sorted(addresses.keys() - set(written)):
            raise ValueError(f"{folder} has no values for {', '.join(missing[:5])}; it belongs to "
                             "another model")
        return len(written)

    def synchronize(self) -> None:
        """Wait until the device has finished what was asked of it; an answer proves life."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _weights(self) -> dict[str, Tensor]:
        return base_parameters(self.model_runner.get_model())


def _tensors_of(files: list[Path]) -> Iterator[tuple[str, Tensor]]:
    from safetensors import safe_open

    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():
                yield name, tensors.get_tensor(name)
