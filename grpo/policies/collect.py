"""Generation with vLLM in this process at less cost in Python for each token.

vLLM's front end brings the state of every request up to date after every step of the engine, with
its log-probs in a structure for several tokens a position. Where only finished requests count and
the sampled tokens alone have log-probs, nobody reads that state before the end, and it takes time
in which no step is started.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from grpo.policies.base import RowListener
from grpo.policies.decode_steps import UNSUPPORTED, Row, check_tokens, short_decode_steps

if TYPE_CHECKING:
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

__all__ = ["Collector", "Response", "collecting", "generate", "responses_alone"]


class Response(NamedTuple):
    """What was sampled for one prompt."""

    tokens: list[int]  # the end token included
    log_probs: list[float]
    finish_reason: str | None  # vLLM's, "length" where the limit ended the row


def generate(
    engine: LLM, prompts: list[list[int]], params: SamplingParams | list[SamplingParams], *,
    lora_request: LoRARequest | None = None, on_row: RowListener | None = None,
) -> list[Response]:
    """Sample one response for each prompt.

    A call that does not end well takes its requests out of the engine.

    Args:
        engine: from :func:`grpo.policies.inprocess.start_engine`.
        prompts: token ids.
        params: for all rows, or those of each, which may differ in their seeds; with
            ``logprobs=0`` and ``flat_logprobs=True``.
        lora_request: the adapter to generate with.
        on_row: is told of each row as soon as it is finished, where nothing but responses is
            collected, see :func:`responses_alone`.

    Returns:
        In the order of the prompts.

    Raises:
        RuntimeError: if the engine does not report one log-prob for each sampled token.

    Examples:
        >>> generate(engine, [[5, 6, 7]], policy.sampling_params(policy.sampling)
        ...          )[0].tokens                                             # doctest: +SKIP
    """
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    with _none_left_over(engine):
        if not responses_alone(engine, params[0] if isinstance(params, list) else params):
            outputs = engine.generate(inputs, params, use_tqdm=False, lora_request=lora_request)
            return [_response(output) for output in outputs]
        with collecting(engine, on_row) as collected:
            outputs = engine.generate(inputs, params, use_tqdm=False, lora_request=lora_request)
        return [collected.response(output) for output in outputs]


def responses_alone(engine: LLM, params: SamplingParams) -> bool:
    """Whether nothing but finished responses and their log-probs is wanted from the engine.

    It is False as well for a front end of another shape than that of vLLM 0.25 to 0.32, with which
    :func:`generate` then works in the ordinary way.
    """
    front_end = getattr(engine.llm_engine, "output_processor", None)
    shape = all(hasattr(front_end, name)
                for name in ("process_outputs", "request_states", "log_stats", "tracing_enabled"))
    return (shape and not (front_end.log_stats or front_end.tracing_enabled
                           or front_end.request_states)
            and _core_has_known_shape() and params.n == 1 and params.logprobs == 0
            and params.prompt_logprobs is None and not params.detokenize and not params.stop)


def _core_has_known_shape() -> bool:
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.outputs import LogprobsLists

    return ({"logprob_token_ids", "logprobs"} <= set(LogprobsLists._fields)
            and {"request_id", "new_token_ids", "new_logprobs", "finish_reason"}
            <= set(EngineCoreOutput.__struct_fields__))


@contextmanager
def _none_left_over(engine: LLM) -> Iterator[None]:
    """Abort what an exception leaves in the engine; the next call would go on with it."""
    before = _request_ids(engine)
    try:
        yield
    except BaseException:
        engine.llm_engine.abort_request([*(_request_ids(engine) - before)], internal=True)
        raise


def _request_ids(engine: LLM) -> set[str]:
    front_end = getattr(engine.llm_engine, "output_processor", None)
    return set(getattr(front_end, "request_states", ()))


@contextmanager
def collecting(engine: LLM, on_row: RowListener | None = None) -> Iterator[Collector]:
    """Within the context the engine's front end sees requests only when they are finished, and its
    scheduler does for their tokens only what they need.

    Args:
        engine: without requests, and one for which :func:`responses_alone` holds.
        on_row: is told of each row as soon as it is finished, where all requests are added before
            the first step, in their order.
    """
    front_end = engine.llm_engine.output_processor
    collector = Collector(front_end, on_row)
    front_end.process_outputs = collector.process_outputs  # hides the method of its class
    try:
        with short_decode_steps(engine, collector.running, when=lambda: not collector.others):
            yield collector
    finally:
        del front_end.process_outputs


class Collector:
    """Keep tokens and log-probs of each request until it is finished.

    Attributes:
        others: names, as :attr:`external_req_id`, of requests that are not collected: their
            outputs go to the front end as they come.
    """

    def __init__(self, front_end: Any, on_row: RowListener | None) -> None:
        self.front_end, self.on_row = front_end, on_row
        self.others: set[str] = set()
        self.numbers: dict[str, int] = {}  # of the rows, by request
        self.process_finished = front_end.process_outputs
        self.running: dict[str, Row] = {}
        self.finished: dict[str, Row] = {}

    def sampled(self, request_id: str) -> int:
        """How many tokens a request has so far."""
        if row := self.running.get(request_id):
            return len(row[0])
        return self.front_end.request_states[request_id].detokenizer.num_output_tokens()

    def forget_aborted(self) -> None:
        """Drop what was sampled for requests that are gone."""
        for request_id in self.running.keys() - self.front_end.request_states.keys():
            del self.running[request_id]

    def process_outputs(self, outputs: list[Any], *args: Any, **kwargs: Any) -> Any:
        """In the place of the front end's method, to which it gives whole responses."""
        running, finished = self.running, []
        if self.on_row is not None and not self.numbers:
            self.numbers = {id: row for row, id in enumerate(self.front_end.request_states)}
        for output in outputs:
            row = running.get(output.request_id)
            if row is None:
                state = self.front_end.request_states.get(output.request_id)
                if state is None:
                    continue  # aborted in the meantime
                if state.external_req_id in self.others:
                    finished.append(output)
                    continue
                row = running[output.request_id] = [], []
            tokens, log_probs = row
            new, reported = output.new_token_ids, output.new_logprobs
            tokens += new
            if type(reported) is list:
                log_probs += reported
            elif reported is not None:
                check_tokens(reported.logprob_token_ids[:, 0].tolist(), [[token] for token in new])
                log_probs += reported.logprobs[:, 0].tolist()
            if output.finish_reason is not None:
                self._end(output, tokens, log_probs)
                finished.append(output)
        return self.process_finished(finished, *args, **kwargs)

    def _end(self, output: Any, tokens: list[int], log_probs: list[float]) -> None:
        if len(tokens) != len(log_probs):
            raise RuntimeError(UNSUPPORTED.format(f"{len(log_probs)} log-probs", len(tokens)))
        state = self.front_end.request_states[output.request_id]
        self.finished[state.external_req_id] = self.running.pop(output.request_id)
        output.new_token_ids, output.new_logprobs = tokens, None
        if self.on_row is not None:
            self.on_row(self.numbers[output.request_id], tokens)

    def response(self, output: Any) -> Response:
        """The response of a finished request, which is forgotten."""
        (answer,) = output.outputs
        tokens, log_probs = self.finished.pop(output.request_id)
        if list(answer.token_ids) != tokens:
            raise RuntimeError(UNSUPPORTED.format(f"{len(answer.token_ids)} tokens in the end",
                                                   len(tokens)))
        return Response(tokens, log_probs, answer.finish_reason)


def _response(output: Any) -> Response:
    (answer,) = output.outputs
    return Response(list(answer.token_ids), list(answer.logprobs.logprobs), answer.finish_reason)
