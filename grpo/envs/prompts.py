"""From problems to prompt tokens, in an order that can be resumed."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo.envs.tasks.base import Problem
from grpo.envs.text_tokens import text_tokens

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prompt:
    """A problem and the token ids of its prompt."""

    problem: Problem
    tokens: list[int] = field(repr=False)


def render(problem: Problem, tokenizer: Any) -> list[int]:
    """Token ids of a problem's prompt: by the tokenizer's chat template for chat messages, which
    brings its own special tokens, and by :func:`~grpo.envs.text_tokens.text_tokens` for text.

    Raises:
        ValueError: if the prompt is chat messages and the tokenizer has no chat template.
    """
    if isinstance(problem.prompt, str):
        return text_tokens(problem.prompt, tokenizer)
    if tokenizer.chat_template is None:
        raise ValueError(f"problem {problem.id!r} is a chat but the tokenizer of model.name has no "
                         "chat template; use an instruction-tuned model")
    text = tokenizer.apply_chat_template(list(problem.prompt), tools=list(problem.tools) or None,
                                         add_generation_prompt=True, tokenize=False)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def render_all(
    problems: Sequence[Problem], tokenizer: Any, *, max_prompt_tokens: int, what: str
) -> list[Prompt]:
    """Render problems and leave out, counted and logged under the name ``what``, those that are too
    long.

    Raises:
        ValueError: if no prompt is short enough.
    """
    prompts = [Prompt(problem, render(problem, tokenizer)) for problem in problems]
    kept = [prompt for prompt in prompts if len(prompt.tokens) <= max_prompt_tokens]
    if long := [prompt for prompt in prompts if len(prompt.tokens) > max_prompt_tokens]:
        longest = max(len(prompt.tokens) for prompt in long)
        names = ", ".join(repr(prompt.problem.id) for prompt in long[:3])
        message = (f"{what}: {len(long)} of {len(prompts)} prompts are longer than "
                   f"env.max_prompt_tokens={max_prompt_tokens} (longest {longest}; first {names})")
        if not kept:
            raise ValueError(f"{message}; nothing is left, raise env.max_prompt_tokens and "
                             "inference_model.max_model_len")
        logger.warning("%s; they are skipped", message)
    return kept


class PromptStream:
    """Endless prompts, in a new seeded order each epoch, with a position that can be saved.

    Args:
        prompts: what to draw from.
        seed: of the orders.
        shuffle: False keeps the given order in every epoch.

    Examples:
        >>> stream = PromptStream([Prompt(Problem(c, c, c), []) for c in "abc"], shuffle=False)
        >>> [p.problem.id for p in stream.take(4)], stream.state_dict()
        (['a', 'b', 'c', 'a'], {'epoch': 1, 'position': 1})
    """

    def __init__(self, prompts: Sequence[Prompt], *, seed: int = 0, shuffle: bool = True) -> None:
        if not prompts:
            raise ValueError("a prompt stream needs at least one prompt")
        self.prompts, self.seed, self.shuffle = list(prompts), seed, shuffle
        self.epoch, self.position = 0, 0
        self._order = self._make_order()

    def take(self, count: int) -> list[Prompt]:
        """The next ``count`` prompts."""
        taken = []
        while len(taken) < count:
            if self.position >= len(self.prompts):  # more than: resumed with fewer prompts
                self.epoch, self.position = self.epoch + 1, 0
                self._order = self._make_order()
            taken.append(self.prompts[self._order[self.position]])
            self.position += 1
        return taken

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        same_order = self.epoch == state["epoch"]
        self.epoch, self.position = state["epoch"], state["position"]
        if not same_order:
            self._order = self._make_order()

    def seek(self, number: int) -> None:
        """Go to the prompt of this number, counted from the beginning of the stream."""
        epoch, position = divmod(number, len(self.prompts))
        self.load_state_dict({"epoch": epoch, "position": position})

    def _make_order(self) -> list[int]:
        order = list(range(len(self.prompts)))
        if self.shuffle:
            random.Random(self.seed * 1_000_003 + self.epoch).shuffle(order)
        return order
