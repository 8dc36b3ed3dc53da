"""What is trained, what generates, and how weights travel between the two.

:mod:`grpo.config.schema` puts the sections into a run; ``docs/weights.md`` explains them.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from grpo.config.devices import reference_apart
from grpo.config.section import Section, server_address
from grpo.config.unread import Unread, only_with
from grpo.objectives.scorer import HeadKind
from grpo.system.http_call import is_loopback

EngineKind = Literal["in_process", "process", "server"]
Device = Annotated[int, Field(ge=0)]
Quantization = Literal["int8", "nf4"]
ServerKind = Literal["own", "vllm", "sglang"]
Sync = Literal["single_copy", "transfer", "lora", "reload", "restart"]

#: Adapters an engine can hold at a time. A server takes up a new one while requests may still
#: finish with the one before.
LORA_SLOTS: dict[EngineKind, int] = {"in_process": 1, "process": 1, "server": 2}

_ADAPTERS = Unread(lambda c: not c.train_model.lora.enabled, "because what is trained keeps its "
                   "dtype; set train_model.lora.enabled=true, or")
_EMBEDDED = Unread(lambda c: c.model.name != "embedded", "because model.name={model.name} is "
                   "trained already; set model.name=embedded, or")
_HEAD = Unread(lambda c: c.train_model.head == "logits", "by train_model.head=logits, which are "
               "the model's own and all there at once; set head=auto, or")
_SERVER = Unread(lambda c: c.engine != "server", "by inference_model.engine="
                 "{inference_model.engine}; set engine=server, or")
_STARTED = Unread(lambda c: c.inference_model.url is not None, "because the server at "
                  "inference_model.url={inference_model.url} runs already; start that with the "
                  "option, or")
_AT_URL = Unread(lambda c: c.inference_model.url is None, "because inference_model.url is null and "
                 "the run starts its own; give the address of one that runs, or")
_STOCK = Unread(lambda c: not c.inference_model.is_stock, "by a server of this library, which has "
                "all of a batch in one call; for others say inference_model.server=vllm or sglang, "
                "or")
# Devices of no reference, or for that of adapters, stay idle, which a line says:
# grpo.run.placement.unused_reference.
_WITHIN = Unread(lambda c: c.needs_reference and not reference_apart(c),
                   "because with train_model.lora.enabled=true the reference is the trainer's own "
                   "model without its adapters; name another model as ref_model.name, or")
_REFERENCE = Unread(lambda c: not c.needs_reference, "because train.kl_to_ref_coeff and "
                    "maxent.beta are null; set the coefficient, or")

_SHARDED = Unread(
    lambda c: not (c.needs_reference and c.has_workers and c.ref_model.count > 1),
    "because the reference has no two devices of its own; set ref_model.num_devices=2 or more, or")


class ModelConfig(Section):
    """What is trained."""

    name: str = "embedded"
    """Folder or hub id of a causal language model, or ``embedded``."""
    warm_start_steps: Annotated[int | None, _EMBEDDED] = Field(None, ge=1)
    warm_start_noise: Annotated[float | None, _EMBEDDED] = Field(None, ge=0, le=1)


class LoRAConfig(Section):
    """Train low-rank adapters instead of the weights."""

    only = only_with("train_model.lora.enabled", "set that to true")

    enabled: bool = False
    r: int = Field(16, ge=1, le=512)
    """Rank."""
    alpha: float = Field(32, gt=0)
    """The adapters' output is scaled by ``alpha / r``."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """On the adapters' input in training. The engine has none, so it moves ratios away from 1."""
    target_modules: list[str] | None = Field(None, min_length=1)
    """Last parts of the names of linear modules; null: those of attention and feed-forward."""
    layer_indices: list[Annotated[int, Field(ge=0)]] | None = Field(None, min_length=1)
    """Decoder layers that get adapters; null: all."""

    def options(self) -> dict[str, Any]:
        """Arguments of :func:`grpo.weights.adapters.make_lora`; null leaves its default."""
        return {key: value for key, value in self.given().items() if key != "enabled"}


class RoleDevices(Section):
    """How many devices a role has, or which."""

    #: The section's key, for messages.
    role: ClassVar[str]

    num_devices: int | None = Field(None, ge=1)
    devices: list[Device] | None = Field(None, min_length=1)
    """Their numbers; null: the first that are free."""

    @property
    def count(self) -> int:
        """How many are asked for; 0: none."""
        return len(self.devices or ()) or self.num_devices or 0

    @model_validator(mode="after")
    def _devices_agree(self) -> RoleDevices:
        if self.devices is None:
            return self
        if self.num_devices not in (None, len(self.devices)):
            raise ValueError(f"{self.role}.num_devices={self.num_devices} and {self.role}.devices="
                             f"{self.devices} contradict each other; remove one of them")
        if len(set(self.devices)) < len(self.devices):
            raise ValueError(f"{self.role}.devices={self.devices} names a GPU twice; name each "
                             "once")
        return self


class TrainModelConfig(RoleDevices):
    """How the trainer's model computes, and where."""

    role = "train_model"

    torch_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """``auto``: bfloat16 on a GPU, float32 on a CPU. Masters are always float32."""
    attn_implementation: str | None = None
    gradient_checkpointing: bool = False
    compile: bool | None = None
    """Compile the decoder layers; null: on GPUs with vLLM where the run is long enough to earn
    the compilation back, see :mod:`grpo.run.fast_defaults`."""
    head: HeadKind = "auto"
    """How log-probs are computed from hidden states; ``auto``: without ever holding all logits."""
    head_chunk_size: Annotated[int | None, _HEAD] = Field(None, ge=1)
    """Tokens whose logits exist at a time; null: by device."""
    fp32_head: Annotated[bool, _HEAD] = False
    """Logits in float32 where weights are bfloat16, in trainer and engine."""
    layer_indices: list[Annotated[int, Field(ge=0)]] | None = Field(None, min_length=1)
    """Decoder layers that are trained, everything else being frozen; null: all of the model."""
    num_devices: int | None = Field(None, ge=1)
    """Devices that train together, each with a part of the model; null: 1."""
    quantization: Annotated[Quantization | None, _ADAPTERS] = None
    """In what the frozen linear layers beneath adapters are kept, see
    :mod:`grpo.weights.quantised`; null: in ``torch_dtype``."""
    lora: LoRAConfig = Field(default_factory=LoRAConfig)

    @property
    def ranks(self) -> int:
        """Processes that train, one a device."""
        return len(self.devices) if self.devices else self.num_devices or 1

    @model_validator(mode="after")
    def _layers_are_the_models_or_the_adapters(self) -> TrainModelConfig:
        if self.lora.enabled and self.layer_indices is not None:
            raise ValueError(f"train_model.layer_indices={self.layer_indices} chooses weights to "
                             "train, but with train_model.lora.enabled=true there are none; use "
                             "train_model.lora.layer_indices")
        return self

    @model_validator(mode="after")
    def _a_quantised_base_is_whole(self) -> TrainModelConfig:
        if self.quantization is None:
            return self
        key = f"train_model.quantization={self.quantization}"
        if self.ranks > 1:
            raise ValueError(f"{key} keeps whole matrices, but {self.ranks} devices of train_model "
                             "have a slice of each; train on one device, or set it to null")
        if self.compile:
            raise ValueError(f"{key} writes values out at each product, which is not compiled; set "
                             "train_model.compile=false, or quantization to null")
        return self


class InferenceModelConfig(RoleDevices):
    """How responses are generated, where, and how weights get there."""

    role = "inference_model"

    backend: Literal["auto", "vllm", "transformers"] = "auto"
    engine: Literal["auto"] | EngineKind = "auto"
    """Where vLLM runs: in the trainer's process, in one of its own, or behind our HTTP server;
    auto: the last where there is a ``url``, the second beside several devices that train."""
    url: Annotated[Annotated[str, server_address("inference_model")] | None, _SERVER] = None
    """``http://host:port`` of a server that runs already; null: the run starts its own."""
    server: Annotated[Literal["auto"] | ServerKind, _AT_URL] = "auto"
    """Whose server that is: of this library, or a stock one; auto: it is asked."""
    connections: Annotated[int | None, _STOCK] = Field(None, ge=1)
    """Requests at a time to a stock server, one a completion; null: 64."""
    weight_sync: Literal["auto"] | Sync = "auto"
    """``auto``: adapters where those are trained, a transfer from several devices, else one copy,
    else a transfer; a checkpoint for a stock server."""
    temperature: float = Field(1.0, gt=0)
    max_tokens: int | None = Field(None, ge=1)
    """Longest response; null: 1024, and 128 for the embedded model on problems it cannot solve."""
    max_model_len: int | None = Field(None, ge=2)
    max_num_seqs: Annotated[int | None, _STARTED] = Field(None, ge=1)
    gpu_memory_utilization: Annotated[float | None, _STARTED] = Field(None, gt=0, le=1)
    kv_cache_memory_bytes: Annotated[int | None, _STARTED] = Field(None, ge=1)
    enforce_eager: Annotated[bool | None, _STARTED] = None
    """null: CUDA graphs on a GPU, nothing compiled on a CPU."""
    ignore_eos: bool = False
    """Always generate ``max_tokens``; for benchmarks."""
    num_devices: int | None = Field(None, ge=1)
    """Devices of its own that generate, on a CPU processes; null: the trainer's, in
    ``grpo-async.py`` those of one engine."""
    tensor_parallel_size: int = Field(1, ge=1)
    """Devices of one engine; there are ``num_devices / tensor_parallel_size`` engines."""

    @model_validator(mode="after")
    def _one_size_of_the_cache(self) -> InferenceModelConfig:
        share, size = self.gpu_memory_utilization, self.kv_cache_memory_bytes
        if share is not None and size is not None:
            raise ValueError(f"inference_model.gpu_memory_utilization={share:g} and inference_model"
                             f".kv_cache_memory_bytes={size} both size the KV cache; give one, "
                             "and leave the other null")
        return self

    @property
    def on_this_host(self) -> bool:
        """Whether the engine can share memory with the trainer."""
        return self.url is None or (not self.is_stock
                                    and is_loopback(urlsplit(self.url).hostname or ""))

    @property
    def is_stock(self) -> bool:
        """Whether the server is known to be none of this library."""
        return self.server in ("vllm", "sglang")


def resolve_sync(
    inference: InferenceModelConfig, lora: LoRAConfig, engine: EngineKind, *, ranks: int = 1
) -> Sync:
    """How weights reach a vLLM engine of this kind from so many ``ranks`` that train.

    Raises:
        ValueError: for a ``weight_sync`` that the other keys rule out, with what to change.

    Examples:
        >>> resolve_sync(InferenceModelConfig(), LoRAConfig(), "in_process")
        'single_copy'
        >>> resolve_sync(InferenceModelConfig(), LoRAConfig(enabled=True), "in_process")
        'lora'
        >>> far = InferenceModelConfig(engine="server", url="http://10.0.0.2:9001")
        >>> resolve_sync(far, LoRAConfig(), "server")
        'transfer'
    """
    chosen = inference.weight_sync
    whole: Sync = "single_copy" if inference.on_this_host and ranks == 1 else (
        "reload" if inference.is_stock else "transfer")
    own: Sync = "lora" if lora.enabled else whole
    if ranks > 1 and (problem := _obstacle_for_ranks(inference, engine, own)):
        raise ValueError(f"{ranks} devices of train_model share a model: {problem}, or train on "
                         "one device")
    if chosen == "auto":
        return own
    if problem := _obstacle(chosen, inference, lora, engine):
        raise ValueError(f"inference_model.weight_sync={chosen} {problem}")
    return chosen


def _obstacle(chosen: Sync, inference: InferenceModelConfig, lora: LoRAConfig,
              engine: EngineKind) -> str | None:
    """Why a way is impossible and what to do about it; None if it is possible."""
    if chosen == "lora" and not lora.enabled:
        return ("carries adapters, but train_model.lora.enabled is false; set that to true, or "
                "weight_sync=auto")
    if inference.is_stock and chosen in ("single_copy", "transfer"):
        return (f"is not what a stock server takes, and that at inference_model.url={inference.url}"
                f" is one (inference_model.server={inference.server}); use weight_sync=auto, or "
                "start a server of this library: python -m grpo.server.serve")
    if lora.enabled and chosen in ("single_copy", "transfer", "reload"):
        return ("carries all weights, but with train_model.lora.enabled=true only adapters are "
                "trained; use weight_sync=lora, or restart with engine=server")
    if chosen == "transfer" and engine == "in_process":
        return ("copies into an engine with memory of its own, but with inference_model.engine="
                "in_process there is none; use weight_sync=single_copy, or engine=process")
    if chosen == "restart" and engine != "server":
        return (f"stops a server and starts another, but inference_model.engine={engine} "
                "is none; use engine=server, or weight_sync=reload")
    if chosen == "restart" and inference.url is not None:
        return (f"needs a server that the run has started, not one at inference_model.url="
                f"{inference.url}; remove the url, or use weight_sync=reload")
    if chosen == "single_copy" and not inference.on_this_host:
        return (f"shares memory, but the server at inference_model.url={inference.url} may be on "
                "another host; use weight_sync=transfer, or the address 127.0.0.1 if it is not")
    return None


def _obstacle_for_ranks(
    inference: InferenceModelConfig, engine: EngineKind, way: Sync
) -> str | None:
    """What several training devices cannot work with and what to do; None if they can."""
    if way == "reload":
        return ("a stock server takes a checkpoint from one of them; train adapters "
                "(train_model.lora.enabled=true), use a server of this library")
    if inference.backend == "transformers":
        return ("inference_model.backend=transformers generates with the trainer's model, of which "
                "each has a part only; use backend=vllm, or give inference_model devices of its "
                "own")
    if engine == "in_process":
        return ("inference_model.engine=in_process takes no weights from several processes; use "
                "engine=process, or auto")
    if inference.weight_sync not in ("auto", way):
        return (f"inference_model.weight_sync={inference.weight_sync} is not how "
                f"{'adapters' if way == 'lora' else 'weights'} are gathered from them; use {way}, "
                "or auto")
    return None


class RefModelConfig(RoleDevices):
    """The reference policy of ``train.kl_to_ref_coeff`` and ``maxent.beta``, and its devices."""

    role = "ref_model"

    name: Annotated[str | None, _REFERENCE] = None
    """null: the model the run starts from; with adapters that is the model without them."""
    num_devices: int | None = Field(None, ge=1)
    """Devices of its own, on a CPU processes, which share the scoring; null: it is on the
    trainer's."""
    sharded: Annotated[bool | None, _WITHIN, _SHARDED] = None
    """Whether these devices have a part each of one copy, and score each group together (FSDP2), or
    a whole copy each; null: parts where a whole copy does not fit a device."""
