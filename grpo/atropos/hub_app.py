"""The hub's routes: those of atroposlib's ``run-api``, and ``/ack``, ``/renew``, ``/release``,
``/health``."""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, Field, NonNegativeInt

from grpo.atropos.hub import Hub, NotRegisteredError, UnknownEnvironmentError, UnknownLeaseError
from grpo.atropos.hub_body import read_model, unpacked_body, validate
from grpo.atropos.schemas import EnvRegistration, Registration, check_wire
from grpo.atropos.wire_json import GroupError, read_json, restandardised, write_json
from grpo.system.http_app import bare_app, from_browser
from grpo.system.json_api import ApiError, json_response

MAX_BODY_BYTES = 32 << 20
# Environments give up after 300 s, and would try again.
WAIT_FOR_ROOM = 200.0
# What run-api's answers always have, in its order.
_FIELDS = ("tokens", "masks", "scores", "advantages", "ref_logprobs", "messages",
           "generation_params", "inference_logprobs", "overrides", "group_overrides", "images",
           "env_id", "distill_token_ids", "distill_logprobs")
_NO_EXAMPLE = {name: [] for name in (
    "tokens", "masks", "scores", "advantages", "ref_logprobs", "generation_params",
    "inference_logprobs", "messages", "images")}


class LeaseName(BaseModel, extra="forbid"):
    """``POST /release``."""

    lease: str


class Acknowledgement(LeaseName):
    """``POST /ack``; ``unused`` are places in the batch."""

    unused: list[NonNegativeInt] = []


class LeaseRenewal(LeaseName):
    """``POST /renew``."""

    lease_seconds: float = Field(gt=0, le=86400)


class LeaseWish(BaseModel):
    """``GET /batch``."""

    lease_seconds: float | None = Field(None, gt=0, le=86400)


class EnvName(BaseModel):
    """``POST /disconnect-env`` and ``GET /status-env``."""

    env_id: int


@dataclass
class Service:
    """What the routes work on."""

    hub: Hub
    changed: asyncio.Condition  # notified when groups left the queue or a retry is to be expected
    max_body_bytes: int  # of a request, unpacked
    wait_for_room: float  # seconds that a sender is held while the queue is full
    private: bool
    waiting_bytes: int = 0  # of groups whose senders are held

    async def until_room(self, size: int, digest: str) -> bool:
        """Hold a sender until its groups may be queued, or are known to be queued already; whether
        it had to wait. After ApiError with status 503 environments try again."""
        def answerable() -> bool:
            return self.hub.has_room() or self.hub.is_retry(digest)

        if answerable():
            return False
        full = ApiError("the hub's queue is full: the trainer is slower than its environments; "
                        "send again later", status=503, type="queue_full")
        if self.waiting_bytes + size > self.hub.limits.queue_bytes + self.max_body_bytes:
            raise full
        self.waiting_bytes += size
        try:
            async with self.changed:
                await asyncio.wait_for(self.changed.wait_for(answerable), self.wait_for_room)
        except TimeoutError:
            raise full from None
        finally:
            self.waiting_bytes -= size
        return True

    async def tell(self) -> None:
        """Let held senders look again."""
        async with self.changed:
            self.changed.notify_all()


def create_app(
    hub: Hub,
    *,
    token: str | None = None,
    max_body_bytes: int = MAX_BODY_BYTES,
    wait_for_room: float = WAIT_FOR_ROOM,
    private: bool = False,
) -> FastAPI:
    """The application around a hub.

    Args:
        hub: the state; nothing else may use it while the application runs.
        token: if given, all routes but ``/health`` want it. Environments have no option for it, but
            send it if their ``rollout_server_url`` is ``http://:<token>@host:port``.
        max_body_bytes: greater requests, packed or unpacked, are answered with 413.
        wait_for_room: seconds that a request is held while the queue is full, before 503.
        private: whether the hub is only for the run that started it, for ``/status``.
    """
    app = bare_app("grpo hub", token=token, max_body_bytes=max_body_bytes,
                   open_paths=("/health",), advice="send smaller groups, or ")
    app.state.service = Service(hub, asyncio.Condition(), max_body_bytes, wait_for_room, private)
    # Plain routes: what FastAPI adds to them would cost more than queueing a group.
    for path, (methods, endpoint) in _ROUTES.items():
        app.add_route(path, endpoint, methods=methods.split())
    return app


async def root(request: Request) -> Response:
    return json_response({"message": "AtroposLib API"})


async def health(request: Request) -> Response:
    return json_response({"status": "healthy"})


async def register(request: Request) -> Response:
    registration = await read_model(request, Registration)
    _hub(request).register(registration, _address(request))
    # 53 bits, so that every JSON reader can represent it.
    return json_response({"uuid": uuid.uuid4().int >> 75})


async def register_env(request: Request) -> Response:
    hub = _hub(request)
    env = hub.register_env(await read_model(request, EnvRegistration))
    trainer = hub.state.registration
    if env is None or trainer is None:
        return json_response({"status": "wait for trainer to start"})
    return json_response({
        "status": "success", "env_id": env.id, "wandb_name": env.name,
        "checkpoint_dir": trainer.checkpoint_dir, "starting_step": hub.state.step,
        "checkpoint_interval": trainer.save_checkpoint_interval, "num_steps": trainer.num_steps})


async def disconnect_env(request: Request) -> Response:
    name = await read_model(request, EnvName)
    try:
        _hub(request).disconnect(name.env_id)
    except UnknownEnvironmentError:
        return json_response({"status": "failure", "error": f"env_id={name.env_id} is not known"})
    return json_response({"status": "success"})


async def wandb_info(request: Request) -> Response:
    trainer = _hub(request).state.registration
    return json_response({"group": trainer and trainer.wandb_group,
                          "project": trainer and trainer.wandb_project})


async def info(request: Request) -> Response:
    trainer = _hub(request).state.registration
    return json_response({"batch_size": trainer.batch_size if trainer else -1,
                          "max_token_len": trainer.max_token_len if trainer else -1})


async def status(request: Request) -> Response:
    figures = _hub(request).status()
    figures["hub"]["private"] = request.app.state.service.private
    return json_response(figures)


async def status_env(request: Request) -> Response:
    name = await read_model(request, EnvName)
    try:
        return json_response(_hub(request).status_env(name.env_id))
    except UnknownEnvironmentError:
        raise ApiError(f"env_id={name.env_id} is none that was given here; register the "
                       "environment", status=404, type="not_found", param="env_id") from None


async def latest_example(request: Request) -> Response:
    return Response(_hub(request).state.latest or orjson.dumps(_NO_EXAMPLE),
                    media_type="application/json")


async def reset_data(request: Request) -> Response:
    _refuse_browsers(request)
    _hub(request).reset()
    await request.app.state.service.tell()
    return Response("Reset successful", media_type="text/plain")


async def batch(request: Request) -> Response:
    _refuse_browsers(request)
    wish = validate(LeaseWish, dict(request.query_params))
    try:
        lease = _hub(request).next_batch(_address(request), lease_seconds=wish.lease_seconds)
    except NotRegisteredError:
        return json_response({"status": "error", "batch": [],
                              "message": "Trainer not registered. Call /register first."})
    if lease is None:
        return json_response({"batch": None})
    await request.app.state.service.tell()
    return Response(lease.body(), media_type="application/json")


async def ack(request: Request) -> Response:
    used = await read_model(request, Acknowledgement)
    try:
        return _of_lease(used.lease, _hub(request).acknowledge, unused=used.unused)
    except ValueError as error:
        raise ApiError(str(error), status=422, type="bad_place", param="unused") from None


async def renew(request: Request) -> Response:
    wish = await read_model(request, LeaseRenewal)
    return _of_lease(wish.lease, _hub(request).renew, lease_seconds=wish.lease_seconds)


async def release(request: Request) -> Response:
    name = await read_model(request, LeaseName)
    return _of_lease(name.lease, _hub(request).release)


async def scored_data(request: Request) -> Response:
    hub, raw = _hub(request), await unpacked_body(request)
    try:
        obj, standard = read_json(raw)
        group = _prepare(obj, raw if standard else None, standard=standard)
    except GroupError as error:
        hub.reject(error.reason, str(error))
        raise _unacceptable(error) from None
    await _queue(request, raw, [group], [obj.get("group_uid")])
    return json_response({"status": "received"})


async def scored_data_list(request: Request) -> Response:
    hub, raw = _hub(request), await unpacked_body(request)
    groups, names, errors = [], [], []
    try:
        objects, standard = read_json(raw)
        if not isinstance(objects, list):
            raise GroupError("bad_type", "the body must be a list of groups")
    except GroupError as error:
        hub.reject(error.reason, str(error))
        raise _unacceptable(error) from None
    for obj in objects:
        try:
            groups.append(_prepare(obj, None, standard=standard))
            names.append(obj.get("group_uid"))
        except GroupError as error:
            hub.reject(error.reason, str(error))
            errors.append(error)
    if errors and not groups:
        raise _unacceptable(errors[0])
    if groups:
        await _queue(request, raw, groups, names)
    answer: dict[str, Any] = {"status": "received", "groups_processed": len(objects)}
    if errors:
        answer |= {"rejected": len(errors), "errors": [str(error) for error in errors[:8]]}
    return json_response(answer)


async def _queue(
    request: Request, raw: bytes, groups: list[tuple[int | None, int, bytes]],
    names: list[str | None],
) -> None:
    """Queue the groups of a request, unless it is a retry of one whose groups were queued."""
    # Groups of the same names are the same groups. Without names, equal groups may be different
    # ones, so that only a sender that may not have had an answer is taken to repeat itself.
    service = request.app.state.service
    hub = service.hub
    named = all(names)
    digest = hashlib.sha256(orjson.dumps(names) if named else raw).hexdigest()
    held = await service.until_room(len(raw), digest)
    if hub.is_retry(digest):
        hub.duplicates += len(groups)
    else:
        hub.add(groups, digest=digest, named=named)
    # A sender that was held may have lost patience, and then sends the same again.
    if held and await request.is_disconnected():
        hub.expect_retry(digest)
        await service.tell()


def _prepare(
    obj: Any, raw: bytes | None, *, standard: bool
) -> tuple[int | None, int, bytes]:
    """Sender, size and JSON of a group, the last from ``raw`` where that can be kept as it is."""
    wire, exact = check_wire(obj)
    if raw is None and standard and exact:
        raw = orjson.dumps(obj)
    if not exact:
        # Known fields with the types that they should have, unknown ones as they came.
        obj = obj | {name: value for name, value in wire if name in obj}
    if raw is None or not exact:
        raw = write_json(obj)
        if not standard:
            restandardised(obj)
    absent: dict[str, Any] = {name: None for name in _FIELDS if name not in obj}
    if "group_uid" not in obj:
        absent["group_uid"] = uuid.uuid4().hex
    if absent:
        raw = orjson.dumps(absent)[:-1] + b"," + raw.lstrip()[1:]
    return wire.env_id, len(wire.tokens), raw


def _refuse_browsers(request: Request) -> None:
    """Want POST of browsers where something changes, because any link makes them send a GET."""
    if request.method == "GET" and from_browser(request):
        raise ApiError(f"GET {request.url.path} changes what the hub has, and may come from a web "
                       "page: use POST", status=403, type="forbidden")


def _of_lease(lease: str, change: Callable[..., None], **options: Any) -> Response:
    try:
        change(lease, **options)
    except UnknownLeaseError:
        raise ApiError(f"lease={lease!r} is not known, or has expired and its batch was given "
                       "to another; ask for longer leases with GET /batch?lease_seconds=",
                       status=409, type="unknown_lease", param="lease") from None
    return json_response({"status": "success"})


def _hub(request: Request) -> Hub:
    return request.app.state.service.hub


def _address(request: Request) -> str:
    return request.client.host if request.client else ""


def _unacceptable(error: GroupError) -> ApiError:
    return ApiError(str(error), status=422, type=error.reason)


# /batch and /reset_data change what the hub has, which is for POST; programs that know run-api use
# GET.
_ROUTES = {
    "/scored_data": ("POST", scored_data), "/scored_data_list": ("POST", scored_data_list),
    "/status-env": ("GET", status_env), "/batch": ("GET POST", batch), "/ack": ("POST", ack),
    "/renew": ("POST", renew), "/release": ("POST", release), "/register": ("POST", register),
    "/info": ("GET", info), "/register-env": ("POST", register_env),
    "/disconnect-env": ("POST", disconnect_env), "/status": ("GET", status),
    "/wandb_info": ("GET", wandb_info), "/": ("GET", root), "/health": ("GET", health),
    "/latest_example": ("GET", latest_example), "/reset_data": ("GET POST", reset_data)}
