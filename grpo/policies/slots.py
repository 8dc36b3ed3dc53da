"""Decode steps ask vLLM's cache manager for a block only where one begins.

vLLM asks it once for each running row and step, which is a quarter of the time in Python between
two steps of a small model with many rows. A block holds several tokens (16 on a GPU): as long as a
row's next token falls into a block that the row has, the answer is "no new block", and nothing is
to be entered in the prefix cache, which knows whole blocks only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm import LLM

__all__ = ["blocks_asked_for_at_borders"]

#: What a scheduler says beside the number of tokens for a row that decodes without guessing ahead.
_PLAIN = {"num_lookahead_tokens": 0}


@contextmanager
def blocks_asked_for_at_borders(engine: LLM) -> Iterator[None]:
    """Within the context the engine's scheduler asks for blocks where blocks begin and end.

    Without effect where the scheduler is in another process, and on models whose layers keep other
    things than the keys and values of all tokens, such as those of a window or states.

    Examples:
        >>> with blocks_asked_for_at_borders(engine):                        # doctest: +SKIP
        ...     engine.generate(prompts, params)
    """
    manager = _manager_of_full_attention(engine)
    if manager is None:
        yield
        return
    size: int = manager.coordinator.single_type_managers[0].block_size
    allocate, cache, no_new = (manager.allocate_slots, manager.cache_blocks,
                               manager.empty_kv_cache_blocks)

    def allocate_slots(request: Any, num_new_tokens: int, **others: Any) -> Any:
        # Whatever else a scheduler may say, such as blocks found in the prefix cache, is for the
        # manager; so is the token that begins a block, or is the last of one and so completes it.
        held = request.num_computed_tokens % size
        if num_new_tokens == 1 and 0 < held < size - 1 and others == _PLAIN:
            return no_new
        return allocate(request, num_new_tokens, **others)

    def cache_blocks(request: Any, num_computed_tokens: int) -> None:
        # A row of a running step is one token longer than at the last call.
        if num_computed_tokens % size == 0:
            cache(request, num_computed_tokens)

    manager.allocate_slots, manager.cache_blocks = allocate_slots, cache_blocks
    try:
        yield
    finally:
        del manager.allocate_slots, manager.cache_blocks  # which hid the methods of its class


def _manager_of_full_attention(engine: LLM) -> Any | None:
    """The KV-cache manager of a scheduler in this process, if it is of the kind known here."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

    core = getattr(engine.llm_engine.engine_core, "engine_core", None)
    scheduler = getattr(core, "scheduler", None)
    manager = getattr(scheduler, "kv_cache_manager", None)
    if type(manager) is not KVCacheManager or getattr(scheduler, "connector", None) is not None:
        return None
    groups = manager.coordinator.single_type_managers
    return manager if [type(group) for group in groups] == [FullAttentionManager] else None
