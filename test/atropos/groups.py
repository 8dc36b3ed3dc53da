"""Groups and registrations for the tests of the hub, the client and the schemas."""

from __future__ import annotations

from grpo.atropos.schemas import EnvRegistration, Registration


def group(*, size: int = 2, tag: int = 7, **fields) -> dict:
    """``size`` sequences of one prompt token and two completion tokens; ``tag`` is the last."""
    return {"tokens": [[5, 6, tag]] * size, "masks": [[-100, 6, tag]] * size,
            "scores": [float(row) for row in range(size)], **fields}


def tag_of(obj) -> int:
    tokens = obj["tokens"] if isinstance(obj, dict) else obj.tokens
    return tokens[0][-1]


def registration(**fields) -> Registration:
    return Registration(**{
        "wandb_group": "g", "wandb_project": "p", "batch_size": 4, "max_token_len": 32,
        "checkpoint_dir": "checkpoints", "save_checkpoint_interval": 5, "starting_step": 0,
        "num_steps": 100, **fields})


def env_registration(**fields) -> EnvRegistration:
    return EnvRegistration(**{"max_token_length": 32, "desired_name": "add", "weight": 1.0,
                              "group_size": 2, **fields})


class Clock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now
