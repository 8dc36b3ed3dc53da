"""What the keys of a run ask of devices, and need no PyTorch to say: a command looks at it before
that is imported, in a configuration that has been composed, but not checked yet."""

from __future__ import annotations

from typing import Any


def needs_reference(config: Any) -> bool:
    """Whether anything is compared with the reference policy.

    ``config`` is a :class:`~grpo.config.schema.Config`, or has the sections and keys of one.
    """
    return config.train.kl_to_ref_coeff is not None or bool(config.maxent.beta)


def reference_apart(config: Any) -> bool:
    """Whether there is a reference that can have devices of its own, which that of adapters cannot:
    it is the trainer's model without them; for ``config`` see :func:`needs_reference`."""
    within = config.train_model.lora.enabled and config.ref_model.name is None
    return needs_reference(config) and not within


def has_workers(config: Any) -> bool:
    """Whether engines of ``grpo.py`` are workers on Ray, because they or the reference have devices
    of their own; for ``config`` see :func:`needs_reference`."""
    engines, reference, own = config.inference_model, config.ref_model, config.train_model.devices
    divided = engines.tensor_parallel_size > 1
    asked = engines.num_devices or engines.devices or divided
    scored = reference_apart(config) and (reference.num_devices or reference.devices)
    # Without workers the engine is on the first device of the trainer, the reference on all.
    return bool(asked and (divided or engines.devices != (own or [])[:1])
                or scored and (own is None or sorted(reference.devices or ()) != sorted(own)))
