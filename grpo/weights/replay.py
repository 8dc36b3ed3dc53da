"""The trainer's side of a check in one launch: a CUDA graph of the model for one shape of batch.

Scoring four short prompts keeps a GPU busy for a millisecond or two, and the processor for twenty:
it launches each kernel of each layer. A graph is launched once.

Compiled layers run uncompiled here. They would compile a second time for these few tokens without
gradients, and what the compiler does at its first call cannot be recorded: the recording breaks,
and its replay reads memory that is not its own.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo.objectives.scorer import TokenScorer
from grpo.policies.scoring import evaluating

logger = logging.getLogger(__name__)

#: Architectures whose forward pass never waits for the GPU; those that route tokens to experts do.
RECORDED = frozenset({"llama", "mistral", "qwen2", "qwen3"})


@dataclass(frozen=True)
class _Recording:
    graph: Any
    tokens_BT: Tensor
    states: Tensor
    addresses: list[int]


class ReplayedScorer(TokenScorer):
    """A :class:`~grpo.objectives.TokenScorer` without gradient that replays its model.

    The second batch of a shape is recorded and later ones are replayed: the first has done what is
    only done once. A recording reads the memory of the parameters it was made with, so it is made
    anew where one of them has moved. Batches with padding, other devices than GPUs and
    architectures that are not :data:`RECORDED` are not recorded; a scorer that packs rows computes
    those of recorded architectures as they are.

    In half precision a replay and the model's own pass round differently, by up to 0.03 nats for
    28 layers: while a stream is recorded Transformers spells the causal mask out, for which
    attention takes another kernel. Neither is more exact than the other.

    Args:
        scorer: whose model, temperature and head are taken.
    """

    def __init__(self, scorer: TokenScorer) -> None:
        architecture = getattr(getattr(scorer.model, "config", None), "model_type", None)
        recorded = architecture in RECORDED
        super().__init__(scorer.model, temperature=scorer.temperature,
                         head="chunked" if scorer.chunked else "logits",
                         chunk_size=scorer.chunk_size,
                         packing=scorer.packing and not recorded,
                         fp32_head=scorer.fp32_head)
        self._measured, self._sharing = scorer._measured, self.packing and scorer.shares_prompts
        self._recordings: dict[tuple[int, ...], _Recording | None] = {}
        self._possible = recorded
        # Where the modules keep what a recording reads; to look for it takes a millisecond.
        self._kept = [kept for module in scorer.model.modules()
                      for kept in (module._parameters, module._buffers)]

    def outputs(self, inputs: dict[str, Any]) -> Tensor:
        recording = self._recording(inputs)
        if recording is None:
            with torch.compiler.set_stance("force_eager"), evaluating(self.model):
                return super().outputs(inputs)
        recording.tokens_BT.copy_(inputs["input_ids"])
        recording.graph.replay()
        return recording.states

    def _recording(self, inputs: dict[str, Any]) -> _Recording | None:
        """What to replay for inputs of this shape, made now if it is time; None: nothing."""
        tokens_BT = inputs["input_ids"]
        if not (self._possible and tokens_BT.is_cuda and inputs["attention_mask"] is None):
            return None
        shape = tuple(tokens_BT.shape)
        if shape not in self._recordings:
            self._recordings[shape] = None
            return None
        recording, addresses = self._recordings[shape], self._addresses()
        if recording is None or recording.addresses != addresses:
            with torch.compiler.set_stance("force_eager"), evaluating(self.model):
                recording = self._recordings[shape] = self._record(inputs, addresses)
        return recording

    def _record(self, inputs: dict[str, Any], addresses: list[int]) -> _Recording | None:
        """The recording; None, once and for all, for a model that cannot be recorded."""
        tokens_BT = inputs["input_ids"].clone()
        inputs = {**inputs, "input_ids": tokens_BT}
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(tokens_BT.device)
        random = torch.cuda.default_generators[tokens_BT.device.index]
        before = random.clone_state()
        try:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):  # libraries prepare themselves for each stream
                super().outputs(inputs)
            torch.cuda.current_stream().wait_stream(stream)
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                states = super().outputs(inputs)
        except RuntimeError as error:  # of CUDA: an operation that waits for the GPU
            logger.info("the canary's model is not recorded as a CUDA graph: %s", error)
            self._possible = False
            random.graphsafe_set_state(before)  # it would go on believing that it is recorded
            return None
        return _Recording(graph, tokens_BT, states, addresses)

    def _addresses(self) -> list[int]:
        return [tensor.data_ptr() for kept in self._kept for tensor in kept.values()
                if tensor is not None]
