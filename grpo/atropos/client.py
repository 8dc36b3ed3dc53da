"""A client of the Atropos API, for trainers and environments.

The API is a hub or an unmodified ``run-api``. A hub gives batches on a lease: what is not
acknowledged is handed out again.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlencode

from grpo.atropos.schemas import EnvRegistration, Registration, ScoredGroup, parse_group
from grpo.atropos.wire_json import GroupError
from grpo.system.json_client import CallError, JsonClient

_RECENT_GROUPS = 1 << 16


class AtroposError(CallError):
    """The API refused or failed a call."""


class AtroposTimeoutError(AtroposError, TimeoutError):
    """A call's deadline passed."""


class AtroposUnreachableError(AtroposError, ConnectionError):
    """Nothing answers at the address, or the connection broke during the call."""


class NotRegisteredError(AtroposError):
    """No trainer is registered, perhaps because the API was started anew."""


@dataclass(frozen=True)
class Batch:
    """Groups that were handed out together.

    Attributes:
        groups: those that can be trained on.
        lease: names the batch in its acknowledgement; None from run-api, which hands out once.
        rejected: number of groups that cannot be trained on, by reason.
        messages: what was wrong with the first group of each reason.
        repeated: number of groups that this client had been given before.
        places: position of each of ``groups`` in what the API answered.
    """

    groups: list[ScoredGroup]
    lease: str | None = None
    rejected: Counter[str] = field(default_factory=Counter)
    messages: dict[str, str] = field(default_factory=dict)
    repeated: int = 0
    places: list[int] = field(default_factory=list)


class AtroposClient(JsonClient):
    """Calls to the API, with the arguments of :class:`~grpo.system.json_client.JsonClient`.

    Examples:
        >>> client = AtroposClient("http://127.0.0.1:8000")
        >>> client.status()["queue_size"]                                # doctest: +SKIP
        12
    """

    refused = AtroposError
    timed_out = (AtroposTimeoutError, "")
    unreachable = (AtroposUnreachableError, "is the Atropos API running?")

    def __init__(self, url: str, *, token: str | None = None, timeout: float = 60.0) -> None:
        super().__init__(url, token=token, timeout=timeout)
        # Names of groups; those of a lease that ran out may come again.
        self._acknowledged: OrderedDict[str, None] = OrderedDict()

    def alive(self) -> bool:
        """True if the API answers; waits 5 seconds at most."""
        return self.answers("/info")

    def wait_ready(self, *, timeout: float) -> None:
        """Wait until the API answers; AtroposTimeoutError after ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        while not self.alive():
            if time.monotonic() > deadline:
                raise AtroposTimeoutError(f"waited {timeout:g} s for the Atropos API at "
                                          f"{self.url}; is it running?")
            time.sleep(0.05)

    def register(self, registration: Registration) -> int:
        """Say that a trainer starts, or starts again; returns the API's number for it."""
        return self.call("POST", "/register", registration.model_dump())["uuid"]

    def batch(self, *, lease_seconds: float = 600.0) -> Batch | None:
        """The next batch, or None if there is none yet.

        Groups that cannot be trained on are left out and counted, and so are those that this client
        has acknowledged before.

        Args:
            lease_seconds: to :meth:`acknowledge` the batch in, where the API is a hub.

        Raises:
            NotRegisteredError: if no trainer is registered.
        """
        query = urlencode({"lease_seconds": lease_seconds})
        answer = self.call("GET", f"/batch?{query}")
        if answer.get("status") == "error":
            raise NotRegisteredError(f"GET {self.url}/batch: {answer.get('message')}")
        if answer["batch"] is None:
            return None
        batch = Batch([], answer.get("lease"))
        for place, obj in enumerate(answer["batch"]):
            try:
                group = parse_group(obj)
            except GroupError as error:
                batch.rejected[error.reason] += 1
                batch.messages.setdefault(error.reason, str(error))
                continue
            batch.groups.append(group)
            batch.places.append(place)
        return self.without_left_out(batch)

    def without_left_out(self, batch: Batch) -> Batch:
        """A batch without the groups that came on its lease and that :meth:`leave_out` names, which
        are counted; for one that was fetched before those names were known."""
        if batch.lease is None:
            return batch
        kept = [(group, place) for group, place in zip(batch.groups, batch.places, strict=True)
                if group.group_uid not in self._acknowledged]
        return replace(batch, groups=[group for group, _ in kept],
                       places=[place for _, place in kept],
                       repeated=batch.repeated + len(batch.groups) - len(kept))

    def acknowledge(self, batch: Batch, *, unused: Sequence[ScoredGroup] = ()) -> bool:
        """Say that a batch was used; does nothing for one without a lease.

        Args:
            batch: as it was handed out.
            unused: those of its groups that were not used; the hub hands them out again.

        Returns:
            Whether the hub knows the lease. If not, it has given the batch to somebody else or has
            lost its state, and the batch may be trained on twice.
        """
        if batch.lease is None:
            return True
        kept = {id(group) for group in unused}
        self.leave_out(group.group_uid for group in batch.groups if id(group) not in kept)
        places = [place for place, group in zip(batch.places, batch.groups, strict=True)
                  if id(group) in kept]
        return self._tell(batch.lease, "/ack", **({"unused": places} if places else {}))

    def leave_out(self, names: Iterable[str]) -> None:
        """Leave out groups of these names (``group_uid``) when they come on a lease."""
        for name in names:
            self._acknowledged[name] = None
        while len(self._acknowledged) > _RECENT_GROUPS:
            self._acknowledged.popitem(last=False)

    def renew(self, batch: Batch, *, lease_seconds: float = 600.0) -> bool:
        """Let a batch's lease begin anew; returns what :meth:`acknowledge` does."""
        return batch.lease is None or self._tell(batch.lease, "/renew", lease_seconds=lease_seconds)

    def release(self, batch: Batch) -> bool:
        """Give a batch back unused; returns what :meth:`acknowledge` does."""
        return batch.lease is None or self._tell(batch.lease, "/release")

    def info(self) -> dict[str, Any]:
        """``batch_size`` and ``max_token_len``, both -1 before a trainer registers."""
        return self.call("GET", "/info")

    def status(self) -> dict[str, Any]:
        """``current_step``, ``queue_size``, and from a hub what it counts."""
        return self.call("GET", "/status")

    def wandb_info(self) -> dict[str, Any]:
        """``group`` and ``project``, both None before a trainer registers."""
        return self.call("GET", "/wandb_info")

    def latest_example(self) -> dict[str, Any]:
        """The last group that came, unchecked; empty lists if there was none."""
        return self.call("GET", "/latest_example")

    def reset_data(self) -> None:
        """Let the API forget everything."""
        self.exchange("GET", "/reset_data")

    def register_env(self, registration: EnvRegistration) -> dict[str, Any]:
        """Register an environment; ``status`` says whether a trainer has started already."""
        return self.call("POST", "/register-env", registration.model_dump())

    def disconnect_env(self, env_id: int) -> dict[str, Any]:
        """Say that an environment ends."""
        return self.call("POST", "/disconnect-env", {"env_id": env_id})

    def status_env(self, env_id: int) -> dict[str, Any]:
        """How an environment should pace itself."""
        return self.call("GET", "/status-env", {"env_id": env_id})

    def send(self, *groups: ScoredGroup | dict[str, Any]) -> dict[str, Any]:
        """Send finished groups.

        Raises:
            AtroposError: with status 422 if the API refuses them, 413 if they are too large.
        """
        wire = [group.to_wire() if isinstance(group, ScoredGroup) else group for group in groups]
        if len(wire) == 1:
            return self.call("POST", "/scored_data", wire[0])
        return self.call("POST", "/scored_data_list", wire)

    def _tell(self, lease: str, path: str, **more: Any) -> bool:
        """Make a call about a lease; whether the hub knows it."""
        try:
            self.call("POST", path, {"lease": lease, **more})
        except AtroposError as error:
            if error.status != 409:
                raise
            return False
        return True
