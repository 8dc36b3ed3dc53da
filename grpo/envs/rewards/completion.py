"""A completion as reward functions get it."""

from __future__ import annotations

from collections.abc import Sequence


class Completion(str):
    """The text of a completion, which also knows its tokens.

    Attributes:
        token_ids: that were sampled, in a dialog in the last turn, the end token included.

    Examples:
        >>> text = Completion("four", token_ids=[7, 1])
        >>> text.upper(), len(text), token_count(text)
        ('FOUR', 4, 2)
    """

    token_ids: tuple[int, ...]

    def __new__(cls, text: str, *, token_ids: Sequence[int]) -> Completion:
        completion = super().__new__(cls, text)
        completion.token_ids = tuple(token_ids)
        return completion

    def __reduce__(self) -> tuple:
        return _completion, (str(self), self.token_ids)


def _completion(text: str, token_ids: tuple[int, ...]) -> Completion:
    return Completion(text, token_ids=token_ids)


def tokens_of(completion: str) -> tuple[int, ...]:
    """The tokens of a completion that an environment has scored.

    Raises:
        TypeError: for a text that has none.
    """
    if not isinstance(completion, Completion):
        raise TypeError("this reward counts tokens, but got a text without them; give it a "
                        "grpo.envs.rewards.Completion")
    return completion.token_ids


def token_count(completion: str) -> int:
    """How many there are."""
    return len(tokens_of(completion))
