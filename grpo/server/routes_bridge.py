"""What a trainer needs of the engine: pauses, sleep, versions, calls into the workers."""

from __future__ import annotations

import os
import time

from fastapi import APIRouter, Request, Response

from grpo.server.api import DeadlineRequest, PauseRequest, RpcRequest, SleepRequest, VersionRequest
from grpo.server.routes_generate import before
from grpo.server.versioned import VersionedEngine
from grpo.system.json_api import ApiError, json_response, read_body
from grpo.weights.handover_file import without_handles

ALIASES = ("VLLM_ENABLE_SHARED_WEIGHTS", "VLLM_BRIDGE_CONFIG_PATH", "LOGDIR")
router = APIRouter()


def _engine(request: Request) -> VersionedEngine:
    return request.app.state.versioned


@router.get("/bridge/info")
async def info(request: Request) -> Response:
    """What this server is, and where it stands."""
    state, engine = request.app.state, _engine(request)
    return json_response({
        **state.info,
        "enabled": state.handover is not None,
        "shared_weights": state.handover is not None,
        "update_count": state.updates,
        "last_update_time": state.last_update,
        "policy_version": engine.version,
        "paused": engine.paused,
        "sleeping": engine.sleeping,
        "open_requests": engine.open_requests,
        "requests": engine.requests,
        "max_model_len": state.generation.max_model_len,
    })


@router.get("/bridge/state_dict_info")
async def state_dict_info(request: Request) -> Response:
    """The hand-over description, without the handles; null where weights are not shared."""
    state = request.app.state
    return json_response({**state.info, "shared_weights_enabled": state.handover is not None,
                          "handover": state.handover and without_handles(state.handover)})


@router.get("/bridge/debug")
async def debug(request: Request) -> Response:
    """Facts for a bug report."""
    state, engine = request.app.state, _engine(request)
    return json_response({
        **state.info, "pid": os.getpid(), "engine_type": type(engine.engine).__name__,
        "errored": engine.engine.errored, "open_requests": engine.open_requests,
        "rpc_methods": state.rpc_methods, "adapters": list(engine.adapters),
        "environment": {name: os.environ.get(name) for name in ALIASES}})


@router.get("/bridge/is_paused")
async def is_paused(request: Request) -> Response:
    """Whether requests wait for ``/bridge/resume``."""
    return json_response({"paused": _engine(request).paused})


@router.get("/bridge/is_sleeping")
async def is_sleeping(request: Request) -> Response:
    """Whether the engine has given its memory back."""
    return json_response({"sleeping": _engine(request).sleeping})


@router.post("/bridge/pause")
async def pause(request: Request) -> Response:
    """Stop sampling; see :meth:`~grpo.server.versioned.VersionedEngine.pause`."""
    body = await read_body(request, PauseRequest)
    await before(_engine(request).pause(body.mode, clear_cache=body.clear_cache), body.timeout,
                 f"running requests to stop (mode {body.mode})")
    return json_response({"status": "paused", "mode": body.mode})


@router.post("/bridge/resume")
async def resume(request: Request) -> Response:
    """Go on sampling."""
    body = await read_body(request, DeadlineRequest)
    await before(_engine(request).resume(), body.timeout, "the engine to resume")
    return json_response({"status": "resumed"})


@router.post("/bridge/sleep")
async def sleep(request: Request) -> Response:
    """Abort what runs and free memory; levels 1 and 2 need a GPU and ``--enable-sleep-mode``."""
    body = await read_body(request, SleepRequest)
    info = request.app.state.info
    if body.level and info.get("device") == "cpu":
        raise ApiError(f"level={body.level} is impossible: vLLM can give memory back on GPUs only, "
                       "and this engine runs on a CPU; level 0 only pauses", status=501,
                       type="not_implemented", param="level")
    if body.level and not info.get("sleep_mode"):
        raise ApiError(f"level={body.level} needs a server started with --enable-sleep-mode; "
                       "level 0 only pauses", status=409, type="conflict", param="level")
    await before(_engine(request).sleep(body.level), body.timeout, "the engine to go to sleep")
    return json_response({"status": "sleeping", "level": body.level})


@router.post("/bridge/wake_up")
async def wake_up(request: Request) -> Response:
    """End a sleep and go on sampling."""
    body = await read_body(request, DeadlineRequest)
    await before(_engine(request).wake_up(), body.timeout, "the engine to wake up")
    return json_response({"status": "awake"})


@router.post("/bridge/reset_prefix_cache")
async def reset_prefix_cache(request: Request) -> Response:
    """Forget cached keys and values; ``reset`` is false if running requests hold some."""
    body = await read_body(request, DeadlineRequest)
    done = await before(_engine(request).engine.reset_prefix_cache(), body.timeout,
                        "the prefix cache to be reset")
    return json_response({"reset": bool(done)})


@router.get("/bridge/version")
async def version(request: Request) -> Response:
    """Policy version of the tokens that are sampled now."""
    return json_response({"version": _engine(request).version})


@router.post("/bridge/version")
async def set_version(request: Request) -> Response:
    """Set the policy version; 409 while tokens are being sampled."""
    body = await read_body(request, VersionRequest)
    state = request.app.state
    await state.versioned.set_version(body.version)
    state.updates, state.last_update = state.updates + 1, time.time()
    return json_response({"version": body.version})


@router.post("/bridge/rpc")
async def rpc(request: Request) -> Response:
    """Call a :class:`~grpo.weights.worker.extension.WeightWorker` method on every worker."""
    body = await read_body(request, RpcRequest)
    known = request.app.state.rpc_methods
    if body.method not in known:
        raise ApiError(f"method={body.method!r} is not offered; known are {', '.join(known)}",
                       status=403, type="forbidden", param="method")
    _engine(request).require_awake()
    results = await before(
        _engine(request).engine.collective_rpc(body.method, args=tuple(body.args)), body.timeout,
        f"{body.method} on the engine's workers")
    return json_response({"results": results})
