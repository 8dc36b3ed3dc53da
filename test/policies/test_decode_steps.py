"""Short decode steps change nothing that vLLM's schedulers decide."""

from __future__ import annotations

import random
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from grpo.policies import collect
from grpo.policies.base import Sampling
from grpo.policies.decode_steps import short_decode_steps
from grpo.policies.vllm import VLLMPolicy

pytestmark = pytest.mark.vllm
BLOCK = 16
# Lengths on both sides of borders; some begin with the same two blocks.
PROMPTS = [[5 + i % 7 for i in range(33)] + [row] * (row % 37) for row in range(12)] + [
    [row + 3] * length for row, length in enumerate((1, 15, 16, 17, 31, 32, 33, 47, 48, 63))]


def blocks_of(config, *, count: int):
    """The engine's own cache, in smaller blocks and fewer of them."""
    group, = config.kv_cache_groups
    return replace(config, num_blocks=count, kv_cache_groups=[
        replace(group, kv_cache_spec=replace(group.kv_cache_spec, block_size=BLOCK))])


def as_if_of_an_engine(engine, kind: str, *, blocks: int):
    """An engine of a scheduler alone, asynchronous or not, over so many blocks."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    core = engine.llm_engine.engine_core.engine_core
    scheduler = {"plain": Scheduler, "asynchronous": AsyncScheduler}[kind](
        vllm_config=engine.llm_engine.vllm_config,
        kv_cache_config=blocks_of(core.scheduler.kv_cache_config, count=blocks),
        structured_output_manager=core.structured_output_manager, block_size=BLOCK)
    return SimpleNamespace(llm_engine=SimpleNamespace(engine_core=SimpleNamespace(
        engine_core=SimpleNamespace(scheduler=scheduler)))), scheduler


def decide(engine, kind: str, context, *, blocks: int) -> tuple[list, int, int, int]:
    """All decisions; how often blocks were asked for, outputs made and places lost."""
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
    from vllm.v1.request import Request

    init_none_hash(sha256)
    alone, scheduler = as_if_of_an_engine(engine, kind, blocks=blocks)
    coordinator, asked, lost, made = scheduler.kv_cache_manager.coordinator, 0, 0, 0
    count = coordinator.get_num_blocks_to_allocate

    def counted(*args, **kwargs):
        nonlocal asked
        asked += 1
        return count(*args, **kwargs)

    coordinator.get_num_blocks_to_allocate = counted
    for number, prompt in enumerate(PROMPTS):
        params = SamplingParams(max_tokens=20 + 11 * number % 50, ignore_eos=True,
                                stop_token_ids=[7] if number % 5 == 0 else [], min_tokens=number)
        params.update_from_generation_config({}, 1)
        scheduler.add_request(Request(
            request_id=str(number), prompt_token_ids=prompt, sampling_params=params,
            pooling_params=None, block_hasher=get_request_block_hasher(BLOCK, sha256)))
    decided, waiting, ended, draw = [], [], {}, random.Random(0)
    rows = {str(number): ([], []) for number in range(len(PROMPTS))}
    with context(alone, rows):
        while scheduler.has_unfinished_requests():
            step = scheduler.schedule()
            lost += len(step.preempted_req_ids or ())
            ids = list(step.num_scheduled_tokens)
            decided.append((
                vars(step) | {"scheduled_cached_reqs": vars(step.scheduled_cached_reqs).copy(),
                              "scheduled_new_reqs": [vars(new) for new in step.scheduled_new_reqs]},
                {id: coordinator.get_blocks(id)[0][-1].block_id for id in ids},
                [block.block_hash is not None for block in scheduler.kv_cache_manager.block_pool
                 .blocks]))
            output = ModelRunnerOutput(
                req_ids=ids, req_id_to_index={id: row for row, id in enumerate(ids)},
                sampled_token_ids=[[draw.randrange(3, 9)] if not scheduler.requests[
                    id].is_prefill_chunk else [] for id in ids], pooler_output=[])
            column = np.array([[*new, 0][0] for new in output.sampled_token_ids]).reshape(-1, 1)
            output.logprobs = LogprobsLists(column, -1.0 * column, column[:, 0], None)
            waiting.append((step, output))
            # The asynchronous one is told of a step when the next has been begun.
            if kind == "plain" or len(waiting) > 1:
                for outputs in scheduler.update_from_output(*waiting.pop(0)).values():
                    for new in outputs.outputs:
                        made += 1
                        tokens, log_probs = rows[new.request_id]
                        tokens += new.new_token_ids
                        log_probs += [-1.0 * token for token in new.new_token_ids]
                        ended |= {new.request_id: new.finish_reason}
    assert all(log_probs == [-1.0 * token for token in tokens]
               for tokens, log_probs in rows.values())
    return [*decided, rows, ended], asked, made, lost


@pytest.mark.parametrize("kind", ["plain", "asynchronous"])
@pytest.mark.parametrize("blocks", [400, 46], ids=["room for all", "rows lose their places"])
def test_schedulers_decide_the_same_and_ask_less(engine, kind, blocks):
    expected, asked, made, lost = decide(engine, kind, lambda *_: nullcontext(), blocks=blocks)
    decided, asked_less, made_less, _ = decide(engine, kind, short_decode_steps, blocks=blocks)
    assert decided == expected
    assert (lost > 0) == (blocks < 100)
    assert asked_less < 0.3 * asked
    assert made_less < 0.3 * made


def test_responses_are_the_same_where_rows_cross_a_border(engine, monkeypatch):
    policy = VLLMPolicy(engine, Sampling(40, seed=3), pad_token_id=0, eos_token_ids=(1,),
                        ignore_eos=True)
    prompts = [[5 + (row + i) % 200 for i in range(length)]
               for row, length in enumerate((86, 87, 88, 100, 126, 127, 128, 129, 150))]
    found = policy.generate_from_ids(prompts)
    policy.calls = 0
    monkeypatch.setattr(collect, "short_decode_steps", lambda *_, **__: nullcontext())
    expected = policy.generate_from_ids(prompts)
    assert (found == expected).all()


def test_scheduler_and_manager_are_left_as_they_were(engine):
    scheduler = engine.llm_engine.engine_core.engine_core.scheduler
    manager = scheduler.kv_cache_manager
    with pytest.raises(KeyboardInterrupt), short_decode_steps(engine, {}):
        assert "allocate_slots" in vars(manager) and "schedule" in vars(scheduler)
        raise KeyboardInterrupt
    assert not {"allocate_slots", "schedule"} & (vars(manager).keys() | vars(scheduler).keys())


def test_other_ways_of_keeping_keys_are_left_alone(engine):
    alone, scheduler = as_if_of_an_engine(engine, "plain", blocks=40)
    manager = scheduler.kv_cache_manager
    manager.coordinator.single_type_managers = (SimpleNamespace(block_size=BLOCK),)
    with short_decode_steps(alone, {}):
        assert "allocate_slots" not in vars(manager)
    with short_decode_steps(SimpleNamespace(llm_engine=SimpleNamespace(
            engine_core=SimpleNamespace())), {}):
        pass  # a scheduler in another process
