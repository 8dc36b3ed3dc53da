"""Decode steps of vLLM's scheduler at less cost in Python for each row.

Between two steps of a small model with many rows the GPU waits for the scheduler. At every token it
asks the cache manager for a block, hashes blocks, looks for the end of the row, and makes an output
that nobody reads before the row is finished. A block holds several tokens (16 on a GPU): as long as
a token falls inside a block and cannot end its row, it is enough to append it. And as long as
nobody waits for a place, the next step is one token more for each row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from vllm import LLM

__all__ = ["Row", "short_decode_steps"]

#: Sampled tokens of a row so far, and the log-prob of each.
Row: TypeAlias = tuple[list[int], list[float]]

#: What a scheduler says beside the number of tokens for a row that decodes without guessing ahead.
_PLAIN = {"num_lookahead_tokens": 0}
#: Releases of vLLM whose bookkeeping for an appended token is known to be the one written here.
_KNOWN_RELEASES = ("0.25.1", "0.32.0")
#: What a step may bring beside tokens and log-probs; the scheduler sees to such a step itself.
_MORE = ("pooler_output", "kv_connector_output", "ec_connector_output", "num_nans_in_logits",
         "routed_experts", "aux_output_connector_output", "sampling_masks")


@contextmanager
def short_decode_steps(
    engine: LLM, running: Mapping[str, Row], *, when: Callable[[], bool] = lambda: True
) -> Iterator[None]:
    """Within the context the engine's scheduler does for a token only what the token needs.

    Its decisions stay the same. Without effect where the scheduler is in another process, and on
    models whose layers keep other things than the keys and values of all tokens, such as those of a
    window or states.

    Args:
        engine: with nothing but requests of one token a step.
        running: by the scheduler's id of a request its row, which gets the tokens that the
            scheduler makes no output of. Tokens of rows that are not there come as outputs.
        when: asked at each step; False while requests want more than tokens and their log-probs,
            and all of a step is to come as outputs.

    Examples:
        >>> with short_decode_steps(engine, {}):                             # doctest: +SKIP
        ...     engine.generate(prompts, params)
    """
    scheduler = _scheduler_of_full_attention(engine)
    if scheduler is None:
        yield
        return
    manager = scheduler.kv_cache_manager
    manager.allocate_slots = _allocating_at_borders(manager)
    if _is_plain(scheduler):
        scheduler.schedule = _one_token_more(scheduler)
    scheduler.update_from_output = _appending(scheduler, running, when)
    try:
        yield
    finally:  # these hid those of the classes
        del manager.allocate_slots, scheduler.update_from_output
        vars(scheduler).pop("schedule", None)


def _allocating_at_borders(manager: Any) -> Callable[..., Any]:
    """The manager's ``allocate_slots``, which is called where blocks begin and end."""
    size, allocate = _block_size(manager), manager.allocate_slots
    no_new = _no_blocks(manager.empty_kv_cache_blocks)

    def allocate_slots(request: Any, num_new_tokens: int, **others: Any) -> Any:
        # Whatever else a scheduler may say, such as blocks found in the prefix cache, is for the
        # manager; so is the token that begins a block, or is the last of one and so completes it.
        held = request.num_computed_tokens % size
        if num_new_tokens == 1 and 0 < held < size - 1 and others == _PLAIN:
            return no_new
        return allocate(request, num_new_tokens, **others)

    return allocate_slots


def _no_blocks(empty: Any) -> Any:
    """The manager's "no new block", which need not look through its groups to say so."""

    class NoBlocks(type(empty)):
        def get_block_ids(self, allow_none: bool = False, **others: Any) -> Any:
            return None if allow_none else super().get_block_ids(**others)

    return NoBlocks(empty.blocks)


def _one_token_more(scheduler: Any) -> Callable[..., Any]:
    """The scheduler's ``schedule``, which is left the steps that are more than a token a row."""
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.core.sched.output import CachedRequestData

    manager, schedule = scheduler.kv_cache_manager, scheduler.schedule
    size, places = _block_size(manager), _places(scheduler)

    def schedule_step(throttle_prefills: bool = False) -> Any:
        rows = None if throttle_prefills else _rows_of_one_token(scheduler, size)
        if not rows:
            return schedule(throttle_prefills)
        ids = [row.request_id for row in rows]
        more = CachedRequestData(
            req_ids=ids, resumed_req_ids=set(), new_token_ids=[], all_token_ids={},
            new_block_ids=[
                None if 0 < row.num_computed_tokens % size < size - 1 else
                manager.allocate_slots(row, 1, **_PLAIN).get_block_ids(allow_none=True)
                for row in rows],
            num_computed_tokens=[row.num_computed_tokens for row in rows],
            num_output_tokens=[len(row._output_token_ids) + row.num_output_placeholders
                               for row in rows])
        # A paused scheduler makes an empty step, with all that is to be told beside the rows.
        pause, scheduler._pause_state = scheduler._pause_state, PauseState.PAUSED_ALL
        try:
            step = schedule()
        finally:
            scheduler._pause_state = pause
        step.scheduled_cached_reqs = more
        step.num_scheduled_tokens = dict.fromkeys(ids, 1)
        step.total_num_scheduled_tokens = len(ids)
        if not scheduler.use_v2_model_runner:
            scheduler.prev_step_scheduled_req_ids.update(ids)
        counts_in_flight = hasattr(rows[0], "num_in_flight_tokens")
        for row in rows:
            row.num_computed_tokens += 1
            row.num_output_placeholders += places
            if counts_in_flight:
                row.num_in_flight_tokens += 1
        return step

    return schedule_step


def _rows_of_one_token(scheduler: Any, size: int) -> list[Any] | None:
    """The rows that get a token in the next step; None if there is more to decide."""
    running, waiting = scheduler.get_request_counts()
    if (waiting and running < scheduler.max_num_running_reqs
            or running > scheduler.max_num_scheduled_tokens
            or scheduler._pause_state.name != "UNPAUSED"):
        return None
    before = None if scheduler.use_v2_model_runner else scheduler.prev_step_scheduled_req_ids
    rows, blocks, longest = [], 0, scheduler.max_model_len
    for row in scheduler.running:
        computed, placed = row.num_computed_tokens, row.num_output_placeholders
        if placed and computed + 2 - placed >= row.num_prompt_tokens + row.max_tokens:
            continue  # its last token is on the way
        if (len(row._all_token_ids) + placed - computed != 1 or row.is_prefill_chunk
                or computed + 1 >= longest or row.mm_features or row.structured_output_request
                or before is not None and row.request_id not in before):
            return None
        blocks += computed % size == 0
        rows.append(row)
    # Where there are too few blocks, somebody must lose its place.
    return rows if blocks <= scheduler.kv_cache_manager.block_pool.get_num_free_blocks() else None


def _is_plain(scheduler: Any) -> bool:
    """Whether a step of this scheduler has nothing but what is written here."""
    return (_is_known() and scheduler.num_lookahead_tokens == scheduler.num_spec_tokens == 0
            and scheduler.num_sampled_tokens_per_step == 1 and not scheduler.use_pp
            and scheduler.max_num_scheduled_tokens
            <= scheduler.scheduler_config.max_num_batched_tokens
            and all(not getattr(scheduler, name, None) for name in (
                "ec_connector", "aux_output_connector", "enable_return_routed_experts")))


def _is_known() -> bool:
    import vllm

    return vllm.__version__.partition("+")[0] in _KNOWN_RELEASES


def _places(scheduler: Any) -> int:
    """How many places a row's token takes when its step is begun, before it is known."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    return 1 if isinstance(scheduler, AsyncScheduler) else 0


def _appending(
    scheduler: Any, running: Mapping[str, Row], when: Callable[[], bool]
) -> Callable[..., Any]:
    """The scheduler's ``update_from_output``, which is left the rows at a border or an end."""
    from vllm.v1.request import RequestStatus

    known, places = _is_known(), _places(scheduler)
    size, longest = _block_size(scheduler.kv_cache_manager), scheduler.max_model_len
    requests, update = scheduler.requests, scheduler.update_from_output

    def append(request: Any, token: int) -> bool:
        """Give the row its token; False if there may be more to do."""
        sampled, tokens, params = (request._output_token_ids, request._all_token_ids,
                                   request.sampling_params)
        length = len(tokens) + 1
        # A block's last token completes its hash, and with the next token its keys are there.
        if (length % size < 2 or length >= longest or len(sampled) + 1 >= request.max_tokens
                or token in params.all_stop_token_ids or params.repetition_detection is not None
                or request.status != RequestStatus.RUNNING
                or getattr(request, "async_tokens_to_discard", 0)
                or getattr(request, "num_stale_output_tokens", 0)):
            return False
        sampled.append(token)
        tokens.append(token)
        request.num_output_placeholders -= places
        if hasattr(request, "num_in_flight_tokens"):
            request.num_in_flight_tokens -= 1
        return True

    def update_from_output(step: Any, output: Any) -> Any:
        log_probs = simple_log_probs(output) if when() else None
        if (known and log_probs is not None and not step.scheduled_spec_decode_tokens
                and all(getattr(output, name, None) in (None, []) for name in _MORE)):
            others = {}
            for id, count in step.num_scheduled_tokens.items():
                row, request, at = running.get(id), requests.get(id), output.req_id_to_index[id]
                new = output.sampled_token_ids[at]
                if (count == len(new) == 1 and row is not None and request is not None
                        and append(request, new[0])):
                    row[0].append(new[0])
                    row[1].append(log_probs[at])
                else:
                    others[id] = count
            step.num_scheduled_tokens = others
        return update(step, output)

    return update_from_output


class StepLogProbs:
    """Log-probs of the tokens of one step, as Python numbers.

    The scheduler gives each request its part with ``slice_request``, as of vLLM's
    ``LogprobsLists``, which would make three arrays and a tuple for a single number.
    """

    __slots__ = ("values",)

    def __init__(self, values: list[float]) -> None:
        self.values = values

    def slice_request(self, row: int, count: int) -> list[float]:
        return self.values[row : row + count]


def simple_log_probs(output: Any) -> list[float] | None:
    """Log-probs of a step with at most one token a request, which ``output`` has as numbers then.

    Raises:
        RuntimeError: if they are those of other tokens.
    """
    reported = getattr(output, "logprobs", None)
    # Requests with several tokens a step have their places in cu_num_generated_tokens.
    if reported is None or getattr(reported, "cu_num_generated_tokens", 0) is not None:
        return None
    # The sampled token's is the first of a position.
    check_tokens(reported.logprob_token_ids[:, 0].tolist(), output.sampled_token_ids)
    values = reported.logprobs[:, 0].tolist()
    output.logprobs = StepLogProbs(values)
    return values


def check_tokens(reported: list[int], sampled: list[list[int]]) -> None:
    """Log-probs must be those of the sampled tokens; a row may have none yet.

    Raises:
        RuntimeError: if they are not.
    """
    pairs = zip(reported, sampled, strict=False)  # there may be rows of padding
    if len(reported) < len(sampled) or any(
            tokens and tokens[0] != token for token, tokens in pairs):
        raise RuntimeError(UNSUPPORTED.format(f"log-probs of {reported}", sampled))


UNSUPPORTED = "the engine returned {} for tokens {}; this version of vLLM is not supported"


def _block_size(manager: Any) -> int:
    return manager.coordinator.single_type_managers[0].block_size


def _scheduler_of_full_attention(engine: LLM) -> Any | None:
    """The scheduler in this process, if it and its cache are of the kinds known here."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

    core = getattr(engine.llm_engine.engine_core, "engine_core", None)
    scheduler = getattr(core, "scheduler", None)
    manager = getattr(scheduler, "kv_cache_manager", None)
    if (type(scheduler) not in (Scheduler, AsyncScheduler) or type(manager) is not KVCacheManager
            or getattr(scheduler, "connector", None) is not None):
        return None
    groups = manager.coordinator.single_type_managers
    return scheduler if [type(group) for group in groups] == [FullAttentionManager] else None
