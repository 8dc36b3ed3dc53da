"""How long a run is, in whichever of three units the user counts; the others follow."""

from __future__ import annotations

import math

from pydantic import Field, model_validator

from grpo.config.objective import ObjectiveConfig

_UNITS = ("max_steps", "data_epochs", "total_dialog_turns")
#: Completions of a run whose length nobody has given: of a model that is to learn something; of the
#: embedded one, which is through with its additions after 360 batches of 256; and batches of a
#: demonstration.
DEFAULT_TURNS, EMBEDDED_TURNS, DEMONSTRATION_BATCHES = 100_000, 92_160, 5


class LengthConfig(ObjectiveConfig):
    """The length of a run, given in one of three keys."""

    max_steps: int | None = Field(None, ge=1)
    """Iterations: rounds of generate, train and publish. One takes several optimizer steps where
    ``train.optim_batch_size`` or ``train.epochs`` says so."""
    data_epochs: float | None = Field(None, gt=0)
    """Passes over the training problems, rounded up to whole batches. ``train.epochs`` is another
    thing: passes over each batch of completions."""
    total_dialog_turns: int | None = Field(None, ge=1)
    """Completions, rounded down to whole batches. All three null: 100,000; 92,160 for the embedded
    model, and 5 batches of it on problems it cannot solve."""

    @model_validator(mode="after")
    def _one_length(self) -> LengthConfig:
        given = [f"train.{key}={getattr(self, key):g}" for key in _UNITS
                 if getattr(self, key) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} each say how long the run is; give one of "
                             "them, and set what a recipe gives to null")
        if self.data_epochs is not None and self.max_sampling_rounds is not None:
            raise ValueError(f"train.data_epochs={self.data_epochs:g} has no fixed number of "
                             f"batches with train.max_sampling_rounds={self.max_sampling_rounds}, "
                             "which draws as many problems as a batch needs; use train.max_steps")
        return self

    def iterations(self, *, batch: int, default_turns: int) -> int:
        """Iterations of the run.

        Args:
            batch: completions of one.
            default_turns: completions of a run whose length is not given.

        Raises:
            ValueError: if the length is given in passes over problems that are not yet counted.
        """
        if self.data_epochs is not None:
            raise ValueError(f"train.data_epochs={self.data_epochs:g} counts training problems, "
                             "whose number is not known yet; call config.for_problems(number)")
        return self.max_steps or (self.total_dialog_turns or default_turns) // batch


def steps_of_epochs(epochs: float, *, problems: int, batch: int) -> int:
    """Iterations in which every problem is drawn ``epochs`` times.

    Args:
        epochs: passes; 0.5 draws half of the problems.
        problems: of the training split.
        batch: problems of an iteration.

    Examples:
        >>> steps_of_epochs(2, problems=7473, batch=64)
        234
        >>> steps_of_epochs(0.3, problems=100, batch=10)
        3
    """
    return math.ceil(round(epochs * problems / batch, 6))
