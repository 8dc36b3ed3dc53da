"""What travels between Atropos environments, the hub and the trainer, and how it is checked.

The format is that of atroposlib 0.4.0 (``atroposlib/api/server.py``). :func:`check_wire` checks
what a server must know to queue a group: types, finite numbers, and lengths of tokens, masks,
scores and sampling log-probs that agree. :func:`parse_group` checks all that a trainer reads. Both
give the reason of a refusal as a short word that can be counted.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from typing import Annotated, Any, TypeVar

import orjson
from pydantic import BaseModel, FailFast, Field, ValidationError

from grpo.atropos.wire_json import GroupError, check_depth

IGNORED = -100  # the mask of a token that is not trained on
PROMPT_LOG_PROB = 1.0  # stands where a log-prob has no meaning
MAX_TOKEN = 2**31
# Greater numbers are faults, and would overflow float32: the norm of a gradient has squares of an
# advantage times a ratio, which may be exp(20).
MAX_VALUE = 1e6  # of scores and advantages
MIN_LOG_PROB = -1e4  # OpenAI's format writes -9999 for a token that cannot be sampled

_Item = TypeVar("_Item")


class _FirstFault(FailFast):
    """Stops a check at the first wrong value; to list a million of them would take seconds."""

    def __hash__(self) -> int:  # typing puts the members of a union into a set
        return hash(self.fail_fast)


_List = Annotated[list[_Item], _FirstFault()]
# Integers that every reader of JSON can represent.
Whole = Annotated[int, Field(gt=-(2**53), lt=2**53)]


class Registration(BaseModel, frozen=True):
    """What a trainer says of itself (``POST /register``)."""

    wandb_group: str
    wandb_project: str
    batch_size: int = Field(ge=1, lt=2**53)  # sequences, not groups
    max_token_len: Whole
    checkpoint_dir: str
    save_checkpoint_interval: Whole
    starting_step: Whole
    num_steps: Whole


class EnvRegistration(BaseModel, frozen=True):
    """What an environment says of itself (``POST /register-env``)."""

    max_token_length: int = Field(ge=1, lt=2**53)
    desired_name: str
    weight: float = Field(allow_inf_nan=False, ge=-1e100, le=1e100)
    group_size: int = Field(ge=1, lt=2**53)
    min_batch_allocation: float | None = Field(None, ge=0, le=1)


class Wire(BaseModel, allow_inf_nan=False, extra="ignore"):
    """One group's fields and their types; unknown fields are left alone."""

    tokens: _List[_List[int]]
    masks: _List[_List[int]]
    scores: _List[float]
    advantages: _List[_List[float]] | _List[float] | None = None
    ref_logprobs: _List[_List[float]] | None = None
    messages: _List[_List[dict[str, Any]]] | None = None
    generation_params: dict[str, Any] | None = None
    inference_logprobs: _List[_List[float]] | None = None
    overrides: _List[dict] | None = None
    group_overrides: dict | None = None
    images: Any = None
    env_id: Whole | None = None
    distill_token_ids: _List[_List[_List[int]]] | None = None
    distill_logprobs: _List[_List[_List[float]]] | None = None
    group_uid: str | None = None


_NUMBERS = frozenset({"tokens", "masks", "scores", "advantages", "ref_logprobs",
                      "inference_logprobs", "distill_token_ids", "distill_logprobs"})


@dataclass(frozen=True, kw_only=True)
class ScoredGroup:
    """Completions of one prompt and their scores; made by :func:`parse_group`.

    A list that is optional is either None or complete: an empty one counts as None.

    Attributes:
        tokens: token ids of each sequence, prompt and completion.
        masks: of each token its id where it is trained on, -100 elsewhere.
        scores: one a sequence.
        advantages: one a sequence, or one a token, if the environment brings its own.
        inference_logprobs: log-prob of each token under the distribution that sampled it; 1.0 on
            prompts.
        ref_logprobs: log-prob of each token under the reference policy.
        messages: the conversation of each sequence.
        generation_params: how the group was sampled, for example ``{"temperature": 1.0}``. Options
            that truncate or shift the distribution (``top_p``, ``min_p``, penalties) keep its rows
            out of the loss.
        overrides: settings of each sequence, such as ``set_advantage_to_zero``.
        group_overrides: settings of the group.
        images: whatever the environment sent.
        env_id: the sender, if it was registered.
        distill_token_ids: ``[sequence][token][k]``, a teacher's likeliest tokens.
        distill_logprobs: their log-probs.
        group_uid: tells the group from all others: the sender's or the hub's name for it, else a
            digest of its content.
    """

    tokens: list[list[int]]
    masks: list[list[int]]
    scores: list[float]
    advantages: list[float] | list[list[float]] | None = None
    inference_logprobs: list[list[float]] | None = None
    ref_logprobs: list[list[float]] | None = None
    messages: list[list[dict[str, Any]]] | None = None
    generation_params: dict[str, Any] | None = None
    overrides: list[dict[str, Any]] | None = None
    group_overrides: dict[str, Any] | None = None
    images: Any = None
    env_id: int | None = None
    distill_token_ids: list[list[list[int]]] | None = None
    distill_logprobs: list[list[list[float]]] | None = None
    group_uid: str = ""

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.tokens)

    def to_wire(self) -> dict[str, Any]:
        """The JSON object of the group."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def parse_group(obj: Any) -> ScoredGroup:
    """Check one group, as decoded from JSON, completely; see :class:`ScoredGroup` for its fields.

    Raises:
        GroupError: naming the field, its value and what is wanted.

    Examples:
        >>> group = parse_group({"tokens": [[5, 6, 7], [5, 8]], "masks": [[-100, 6, 7], [-100, 8]],
        ...                      "scores": [1, 0]})
        >>> len(group), group.scores, group.inference_logprobs
        (2, [1.0, 0.0], None)
        >>> parse_group({"tokens": [[5, 6]], "masks": [[-100, 6]], "scores": [float("nan")]})
        Traceback (most recent call last):
        grpo.atropos.wire_json.GroupError: scores[0]=nan: Input should be a finite number
    """
    wire, _ = check_wire(obj)
    found = {name: None if isinstance(value, list) and not value else value
             for name, value in wire}
    _check_masks(wire)
    for name in ("advantages", "ref_logprobs", "distill_token_ids", "distill_logprobs", "messages",
                 "overrides"):
        if found[name] is not None:
            per_row = name in ("messages", "overrides") or (
                name == "advantages" and isinstance(found[name][0], float))
            _check_rows(name, found[name], wire.tokens, positions=not per_row)
    _check_teacher(found["distill_token_ids"], found["distill_logprobs"], wire.masks)
    _check_numbers(found)
    _check_temperatures(found)
    found["group_uid"] = found["group_uid"] or _digest(wire)
    return ScoredGroup(**found)


def check_wire(obj: Any) -> tuple[Wire, bool]:
    """Check one group, as decoded from JSON, as far as a queue must; errors as :func:`parse_group`.

    Like run-api, it takes what can be read as the right type (``"1"`` or ``True`` as a number).

    Returns:
        The group, and whether each value already had its right type.
    """
    exact = True
    check_depth(obj, known=_NUMBERS)
    try:
        wire = Wire.model_validate(obj, strict=True)
    except ValidationError:
        exact = False
        try:
            wire = Wire.model_validate(obj)
        except ValidationError as error:
            raise _wrong_type(error) from None
    if not wire.tokens:
        raise GroupError("empty_group", "tokens=[] has no sequence; send groups of one or more")
    for index, row in enumerate(wire.tokens):
        if not row:
            raise GroupError("empty_sequence", f"tokens[{index}]=[] has no token; leave the "
                             "sequence out")
    _check_rows("masks", wire.masks, wire.tokens)
    _check_rows("scores", wire.scores, wire.tokens, positions=False)
    if wire.inference_logprobs:
        _check_rows("inference_logprobs", wire.inference_logprobs, wire.tokens)
    for number, messages in enumerate(wire.messages or []):
        for message in messages:
            if not {"role", "content"} <= message.keys():
                raise GroupError("bad_type", f"messages[{number}] has a message without role or "
                                 "content")
    return wire, exact


def _check_rows(name: str, rows: list, tokens: list[list[int]], *, positions: bool = True) -> None:
    if len(rows) != len(tokens):
        raise GroupError("bad_length", f"{name} has {len(rows)} entries for {len(tokens)} "
                         "sequences; send one for each")
    if positions:
        for index, (row, of_row) in enumerate(zip(rows, tokens, strict=True)):
            if len(row) != len(of_row):
                raise GroupError("bad_length", f"{name}[{index}] has {len(row)} entries for "
                                 f"{len(of_row)} tokens; send one for each")


def _check_masks(wire: Wire) -> None:
    trained = False
    for index, (tokens, masks) in enumerate(zip(wire.tokens, wire.masks, strict=True)):
        _check_tokens(f"tokens[{index}]", tokens)
        for token, mask in zip(tokens, masks, strict=True):
            if mask == token:
                trained = True
            elif mask != IGNORED:
                raise GroupError(
                    "bad_mask", f"masks[{index}] has {mask} over token {token}; send the token "
                    f"where it is trained on, {IGNORED} elsewhere")
    if not trained:
        raise GroupError("nothing_trained", f"masks is {IGNORED} everywhere: there is nothing to "
                         "train on")


def _check_tokens(name: str, tokens: list[int]) -> None:
    for token in (min(tokens), max(tokens)) if tokens else ():
        if not 0 <= token < MAX_TOKEN:
            raise GroupError("bad_token", f"{name} has {token}, which is no token")


def _check_teacher(
    token_ids: list | None, log_probs: list | None, masks: list[list[int]]
) -> None:
    if (token_ids is None) != (log_probs is None):
        raise GroupError("bad_length", "distill_token_ids and distill_logprobs go together; send "
                         "both or none")
    for index, (ids, values) in enumerate(zip(token_ids or [], log_probs or [], strict=True)):
        if list(map(len, ids)) != list(map(len, values)):
            raise GroupError("bad_length", f"distill_logprobs[{index}] has not one value for each "
                             "of distill_token_ids")
        for ids_K in ids:
            _check_tokens(f"distill_token_ids[{index}]", ids_K)
        for values_K, mask in zip(values, masks[index], strict=True):
            # A little above 0 is what rounding makes of a probability of 1.
            most = MAX_VALUE if mask == IGNORED else 0.01
            _check_range(f"distill_logprobs[{index}]", values_K, MIN_LOG_PROB, most)


def _check_numbers(found: dict[str, Any]) -> None:
    _check_range("scores", found["scores"], -MAX_VALUE, MAX_VALUE)
    advantages = found["advantages"] or []
    if advantages and isinstance(advantages[0], float):
        _check_range("advantages", advantages, -MAX_VALUE, MAX_VALUE)
    else:
        for index, row in enumerate(advantages):
            _check_range(f"advantages[{index}]", row, -MAX_VALUE, MAX_VALUE)
    for name in ("inference_logprobs", "ref_logprobs"):
        for index, row in enumerate(found[name] or []):
            _check_range(f"{name}[{index}]", row, MIN_LOG_PROB, MAX_VALUE)


def _check_range(name: str, values: list[float], least: float, most: float) -> None:
    for value in (min(values), max(values)) if values else ():
        if not least <= value <= most:
            raise GroupError("out_of_range", f"{name} has {value:g}; such numbers must be from "
                             f"{least:g} to {most:g}")


def _check_temperatures(found: dict[str, Any]) -> None:
    sources = {"generation_params": found["generation_params"],
               "group_overrides": found["group_overrides"],
               **{f"overrides[{i}]": row for i, row in enumerate(found["overrides"] or [])}}
    for name, source in sources.items():
        value = (source or {}).get("temperature")
        if value is None:
            continue
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not (number and 0 <= value <= MAX_VALUE):
            raise GroupError("bad_type", f"{name}.temperature={str(value)[:60]} must be a number "
                             "of 0 or more")


def _wrong_type(error: ValidationError) -> GroupError:
    errors = error.errors()
    # A value that fits no type of a union has an error for each of them.
    first = next((one for one in errors if one["type"] == "finite_number"), errors[0])
    # The path of such an error has the name of the type, too, which tells an environment nothing.
    steps = [step for step in first["loc"] if isinstance(step, int) or "[" not in step]
    where = "".join(f"[{step}]" if isinstance(step, int) else step for step in steps) or "a group"
    reason = "not_finite" if first["type"] == "finite_number" else "bad_type"
    if first["type"] == "missing":
        return GroupError(reason, f"{where} is missing")
    return GroupError(reason, f"{where}={_brief(first['input'])}: {first['msg']}")


def _brief(value: Any) -> str:
    """A value for a message, where a list or an object is only counted."""
    if isinstance(value, (list, dict)):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    return str(value)[:60]


def _digest(wire: Wire) -> str:
    content = orjson.dumps([wire.env_id, wire.tokens, wire.scores, wire.inference_logprobs])
    return hashlib.blake2b(content, digest_size=12).hexdigest()
