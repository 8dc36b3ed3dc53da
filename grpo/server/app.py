"""The engine server's application: its routes around a running engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response

from grpo.server import routes_bridge, routes_generate, routes_lora, routes_openai
from grpo.server.generation import Generation
from grpo.server.versioned import Constructors, VersionedEngine
from grpo.system.http_app import bare_app, fault
from grpo.system.json_api import ApiError

MAX_BODY_BYTES = 32 << 20


def create_app(
    engine: Any, *, tokenizer: Any, model_names: tuple[str, ...], max_model_len: int,
    vocab_size: int, make: Constructors | None = None, token: str | None = None,
    max_body_bytes: int = MAX_BODY_BYTES, rpc_methods: tuple[str, ...] = (),
    info: dict[str, Any] | None = None, handover: dict[str, Any] | None = None,
    trust_templates: bool = False, adapter_roots: tuple[Path, ...] | None = None,
) -> FastAPI:
    """The application around a running engine.

    Args:
        engine: vLLM's ``AsyncLLM``.
        tokenizer: of the model, with its chat template.
        model_names: names by which requests may call the model; the first is shown.
        max_model_len: prompt plus response, in tokens.
        vocab_size: of the model.
        make: how to build vLLM's types; imports vLLM if left out.
        token: if given, all routes but ``/health`` want ``Authorization: Bearer <token>``.
        max_body_bytes: greater requests are answered with 413.
        rpc_methods: what ``/bridge/rpc`` may call on the workers.
        info: facts that ``/bridge/info`` repeats. ``max_lora_rank`` set means adapters can be
            loaded, ``sleep_mode`` true that the engine can give its memory back, ``private`` true
            that it is for the run that started it.
        handover: description of the shared weights, where they are shared.
        trust_templates: run chat templates that come with requests, apart and with limits.
        adapter_roots: adapters are loaded from folders in these; None: from anywhere.
    """
    app = bare_app("grpo engine", token=token, max_body_bytes=max_body_bytes,
                   open_paths=("/health",), advice="send fewer prompts a request, or ")
    state = app.state
    state.versioned = VersionedEngine(engine, model_names=model_names,
                                      make=make or Constructors.vllm())
    state.generation = Generation(state.versioned, tokenizer=tokenizer,
                                  max_model_len=max_model_len, vocab_size=vocab_size)
    state.info = {"model_name": model_names[0], "model": model_names[-1], **(info or {})}
    state.handover, state.rpc_methods = handover, rpc_methods
    state.trust_templates = trust_templates
    state.adapter_roots = adapter_roots and tuple(root.resolve() for root in adapter_roots)
    state.updates, state.last_update = 0, 0.0
    app.add_exception_handler(Exception, _fault)
    for module in (routes_generate, routes_openai, routes_bridge, routes_lora):
        app.include_router(module.router)
    return app


async def _fault(request: Request, error: Exception) -> Response:
    """What goes wrong after the engine's death goes wrong because of it."""
    if not request.app.state.versioned.engine.errored:
        return await fault(request, error)
    return ApiError(f"the engine died; see the server's log and start it again ({error})",
                    status=503, type="engine_dead").response()
