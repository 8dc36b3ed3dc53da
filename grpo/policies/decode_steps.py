"""Decode steps of vLLM's scheduler at less cost in Python for each row.

Between two steps of a small model with many rows the GPU waits for the scheduler. It asks the
cache manager for a block, hashes blocks and looks for the end of each row at every token. A block
holds several tokens (16 on a GPU): as long as a row's token falls inside a block and cannot end the
row, there is no block to ask for, none to enter in the prefix cache, and nothing to look for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm import LLM

__all__ = ["short_decode_steps"]

#: What a scheduler says beside the number of tokens for a row that decodes without guessing ahead.
_PLAIN = {"num_lookahead_tokens": 0}


@contextmanager
def short_decode_steps(engine: LLM) -> Iterator[None]:
    """Within the context the engine's scheduler does for a token only what the token needs.

    Its decisions stay the same. Without effect where the scheduler is in another process, and on
    models whose layers keep other things than the keys and values of all tokens, such as those of a
    window or states.

    Examples:
        >>> with short_decode_steps(engine):                                 # doctest: +SKIP
        ...     engine.generate(prompts, params)
    """
    scheduler = _scheduler_of_full_attention(engine)
    if scheduler is None:
        yield
        return
    manager = scheduler.kv_cache_manager
    manager.allocate_slots = _allocating_at_borders(manager)
    scheduler._update_request_with_output = _appending(scheduler)
    try:
        yield
    finally:
        del manager.allocate_slots, scheduler._update_request_with_output  # of the instances


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


def _appending(scheduler: Any) -> Callable[..., Any]:
    """The scheduler's ``_update_request_with_output``, for a token inside a block and a row."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    size, longest = _block_size(scheduler.kv_cache_manager), scheduler.max_model_len
    update = scheduler._update_request_with_output
    # The token's place was taken when its step was begun, before the one before was known.
    places = 1 if isinstance(scheduler, AsyncScheduler) else 0

    def append(request: Any, new_token_ids: list[int], is_stale: bool = False) -> Any:
        sampled, all_tokens = request._output_token_ids, request._all_token_ids
        length, params = len(all_tokens) + 1, request.sampling_params
        # A block's last token completes its hash, and with the next token its keys are there.
        if (len(new_token_ids) == 1 and length % size > 1 and length < longest
                and len(sampled) + 1 < request.max_tokens and not is_stale
                and not getattr(request, "async_tokens_to_discard", 0)
                and new_token_ids[0] not in params.all_stop_token_ids
                and params.repetition_detection is None):
            sampled.append(new_token_ids[0])
            all_tokens.append(new_token_ids[0])
            request.num_output_placeholders -= places
            return new_token_ids, False
        return update(request, new_token_ids, **({"is_stale": True} if is_stale else {}))

    return append


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
