"""Every key, in every mode, changes what the run does, or is refused with its name and the fix.

What this cannot see. Stand-ins take what vLLM, servers, other ranks, Ray and the API would be
given; that those read it is tested where they are (``test/engines``, ``test/weights`` and
``test/atropos``). A value that a part looks up in itself counts as used, although it may be thrown
away after that. A difference is taken for the key's, so one that is made by chance in an
asynchronous run would hide a key that does nothing, though not for long. One value of each key is
tried, in runs of one size, on a CPU; what is shown elsewhere is in ``values.py``.
"""

from __future__ import annotations

import pytest

from grpo.config.schema import ConfigError
from grpo.envs.tasks.arithmetic import ArithmeticTask
from grpo.envs.tasks.base import register_task

from .modes import MODES, SCHEMAS, Mode
from .running import Runner
from .values import ELSEWHERE, HOLDS, VALUES
from .watching import Observation, keys_of

QUICK = ("sync", "sync, engine=server", "async, Transformers", "atropos, one copy",
         "atropos, one copy, evaluated", "atropos, bridge")

# Another name of a key, and one that is read of what is saved of a run.
NOT_BY_ITSELF = {"policy.kl_coef", "train.exp_name"}


@pytest.fixture(scope="module", autouse=True)
def other_task():
    @register_task("other_arithmetic")
    class Other(ArithmeticTask):
        def split(self, split: str) -> list:
            return super().split(split)[::-1]


@pytest.fixture(scope="module")
def run(tmp_path_factory, tokenizer) -> Runner:
    return Runner(tmp_path_factory.mktemp("keys"), tokenizer)


def value_of(run: Runner, mode: Mode, key: str):
    """A value that neither the mode nor the schema has; None where there is no other."""
    present = run.values(mode)
    for part in key.split("."):
        present = present.get(part) if isinstance(present, dict) else None
    return next((value for value in VALUES[key] if value != present), None)


def keys_to_try(mode: Mode):
    for key in keys_of(mode.schema):
        holds = HOLDS.get(key)
        if not (key in ELSEWHERE or (holds and holds(mode))):
            yield key


def refusal(error: Exception, key: str, value: object) -> str | None:
    """What is wrong with a message that refuses a key; None if nothing is."""
    text, name = str(error), key.rpartition(".")[2]
    if name not in text and str(value) not in text:
        return f"refused without its name: {text}"
    return None


@pytest.mark.parametrize("script", SCHEMAS)
def test_every_key_of_the_schemas_has_a_value_to_be_tried_with(script):
    keys = set(keys_of(SCHEMAS[script]))
    assert not keys - VALUES.keys() - ELSEWHERE.keys()
    everywhere = {key for schema in SCHEMAS.values() for key in keys_of(schema)}
    assert not (VALUES.keys() | ELSEWHERE.keys() | HOLDS.keys()) - everywhere


@pytest.mark.parametrize("name", QUICK)
def test_every_key_that_is_not_refused_is_read(run, name):
    mode, wrong = MODES[name], {}
    read = run(mode).keys
    for key in keys_to_try(mode):
        value = value_of(run, mode, key)
        if key in read | NOT_BY_ITSELF or value is None:
            continue
        try:
            run(mode, key, value)
        except ValueError as error:
            if fault := refusal(error, key, value):
                wrong[key] = fault
        else:
            wrong[key] = f"{value!r} is accepted, and read by nothing"
    assert not wrong, "\n".join(f"{key}: {what}" for key, what in wrong.items())


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", MODES)
def test_every_key_that_is_not_refused_changes_what_the_run_does(run, name):
    mode, wrong = MODES[name], {}
    base = run(mode)
    noise = base.differs(run(mode), set())
    for key in keys_to_try(mode):
        value = value_of(run, mode, key)
        if value is not None and (fault := fault_of(run, mode, base, noise, key, value)):
            wrong[key] = fault
    assert not wrong, "\n".join(f"{key}: {what}" for key, what in wrong.items())


def fault_of(
    run: Runner, mode: Mode, base: Observation, noise: set[str], key: str, value: object
) -> str | None:
    try:
        seen = run(mode, key, value)
    except (ValueError, ConfigError) as error:
        return refusal(error, key, value)
    return None if seen.differs(base, noise) else f"{value!r} is accepted, and changes nothing"
