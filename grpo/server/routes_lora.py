"""LoRA adapters: which there are, loading one from a folder or from the workers' memory."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response

from grpo.server.api import (
    AdapterFolderRequest,
    AdapterNameRequest,
    DeadlineRequest,
    LoraLoadRequest,
)
from grpo.server.routes_generate import before
from grpo.server.versioned import Adapter, VersionedEngine
from grpo.system.json_api import ApiError, json_response, read_body, shorten

router = APIRouter()


def _engine(request: Request) -> VersionedEngine:
    return request.app.state.versioned


@router.get("/lora/status")
async def lora_status(request: Request) -> Response:
    """The active adapter, all loaded ones, and adapter folders in ``LOGDIR``."""
    engine = _engine(request)
    log_dir = os.environ.get("LOGDIR")
    folders = sorted(Path(log_dir).glob("*/adapter_config.json")) if log_dir else []
    return json_response({
        "lora_available": request.app.state.info.get("max_lora_rank") is not None,
        "active_adapter_path": engine.active and engine.active.path,
        "active_adapter_name": engine.active and engine.active.name,
        "active_adapter_id": engine.active and engine.active.id,
        "load_count": engine.lora_loads,
        "loaded_adapters": list(engine.adapters),
        "available_adapters": [file.parent.name for file in folders],
    })


@router.post("/lora/load")
async def lora_load(request: Request) -> Response:
    """Load an adapter under a new name, ``<adapter_name>-v<n>``, and make it the active one.

    Requests that name no model, or ``<adapter_name>`` alone, use the newest load.
    """
    return await _load(request, await read_body(request, LoraLoadRequest))


@router.post("/v1/load_lora_adapter")
async def load_lora_adapter(request: Request) -> Response:
    """``/lora/load`` with the path and the field names of vLLM's own server."""
    body = await read_body(request, AdapterFolderRequest)
    return await _load(request, LoraLoadRequest(adapter_path=body.lora_path,
                                                adapter_name=body.lora_name))


async def _load(request: Request, body: LoraLoadRequest) -> Response:
    max_rank = request.app.state.info.get("max_lora_rank")
    if max_rank is None:
        raise ApiError("adapters need a server started with --enable-lora", status=409,
                       type="conflict")
    engine, config = _engine(request), None
    engine.require_awake()
    name = body.adapter_name or "adapter"
    if body.adapter_id is not None:
        work = engine.attach_adapter(name, body.adapter_id, version=body.version)
    else:
        folder = _allowed_folder(body.adapter_path, request.app.state.adapter_roots)
        config = _adapter_config(folder, max_rank)
        work = engine.load_adapter(name, body.adapter_path, version=body.version)
    adapter: Adapter = await before(work, body.timeout, f"adapter {name}")
    return json_response({
        "status": "ok", "adapter_path": adapter.path, "adapter_name": adapter.name,
        "adapter_id": adapter.id, "load_count": engine.lora_loads, "policy_version": engine.version,
        "adapter_config": config})


@router.post("/lora/unload")
async def lora_unload(request: Request) -> Response:
    """Go back to the base model."""
    body = await read_body(request, DeadlineRequest)
    previous: Adapter | None = await before(_engine(request).unload_adapter(), body.timeout,
                                            "the adapter to be unloaded")
    return json_response({"status": "ok", "previous_adapter": previous and previous.path,
                          "previous_name": previous and previous.name})


@router.post("/v1/unload_lora_adapter")
async def unload_lora_adapter(request: Request) -> Response:
    """``/lora/unload`` as vLLM's own server has it.

    An adapter that is no longer the active one goes by itself, at the first load or unload that
    finds it without requests; to unload it is no error.
    """
    body = await read_body(request, AdapterNameRequest)
    adapter = await _engine(request).unload_named(body.lora_name)
    return json_response({"status": "ok", "previous_adapter": adapter and adapter.path,
                          "previous_name": adapter and adapter.name})


def _allowed_folder(folder: str, roots: tuple[Path, ...] | None) -> Path:
    """The folder, links followed.

    Raises:
        ApiError: 403 if it is in none of the roots.
    """
    try:
        path = Path(folder).resolve()
        path.stat()
    except FileNotFoundError:
        pass  # is said below, of the file that is wanted
    except (OSError, ValueError, RuntimeError) as error:  # no path, none of ours, a loop of links
        raise ApiError(f"adapter_path={shorten(folder)}: {error}",
                       param="adapter_path") from None
    if roots is not None and not any(path.is_relative_to(root) for root in roots):
        raise ApiError(f"adapter_path={shorten(folder)} is not in "
                       f"{' or '.join(map(str, roots))}; start the server with another "
                       "--adapter-root", status=403, type="forbidden", param="adapter_path")
    return path


def _adapter_config(path: Path, max_rank: int) -> dict[str, Any]:
    folder = str(path)
    if not (path / "adapter_config.json").is_file():
        raise ApiError(f"adapter_path={folder}: there is no adapter_config.json", status=404,
                       type="not_found", param="adapter_path")
    if not any((path / name).is_file() for name in
               ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")):
        raise ApiError(f"adapter_path={folder}: there is no adapter_model.safetensors",
                       status=404, type="not_found", param="adapter_path")
    try:
        config = json.loads((path / "adapter_config.json").read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise ApiError(f"adapter_path={folder}: adapter_config.json is not JSON: {error}",
                       param="adapter_path") from None
    if not isinstance(config, dict) or type(config.get("r", 0)) is not int:
        raise ApiError(f"adapter_path={folder}: adapter_config.json must be a JSON object whose r "
                       "is a whole number", param="adapter_path")
    if config.get("r", 0) > max_rank:
        raise ApiError(f"adapter_path={folder} has rank {config['r']} but the server was started "
                       f"with --max-lora-rank {max_rank}", param="adapter_path")
    return {key: config.get(key) for key in
            ("r", "lora_alpha", "target_modules", "base_model_name_or_path")}
