"""From problems to prompt tokens, in an order that can be resumed."""

from __future__ import annotations

import hashlib
import json
import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from grpo.envs.tasks.base import Problem
from grpo.envs.text_tokens import text_tokens, tokens_before

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prompt:
    """A problem and the token ids of its prompt."""

    problem: Problem
    tokens: list[int] = field(repr=False)


#: What ``env.thinking_prompt=true`` adds to the first message.
THINKING_PROMPT = ("Think step by step before you answer, and write your thoughts between <think> "
                   "and </think>.")
# Of models without one: plain text, which a base model has seen much of. What the model has said
# ends with its end token, as when it samples it.
_PLAIN_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] | capitalize }}: {{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}")


def framed(
    problem: Problem, *, system_prompt: str | None, thinking_prompt: bool | str | None
) -> Problem:
    """A problem with what every prompt is to begin with; a text becomes the user's message.

    Args:
        problem: of any task.
        system_prompt: takes the place of a first message of the system; "" only takes it away,
            None leaves it.
        thinking_prompt: is added to that message, which is made if there is none; True:
            :data:`THINKING_PROMPT`.

    Examples:
        >>> framed(Problem("1+1=", "2", "p0"), system_prompt="Be brief.", thinking_prompt=None)
        ... # doctest: +NORMALIZE_WHITESPACE
        Problem(prompt=({'role': 'system', 'content': 'Be brief.'},
                        {'role': 'user', 'content': '1+1='}), answer='2', id='p0')
    """
    thinking = THINKING_PROMPT if thinking_prompt is True else thinking_prompt or ""
    if system_prompt is None and not thinking:
        return problem
    messages = list(problem.prompt)
    if isinstance(problem.prompt, str):
        messages = [{"role": "user", "content": problem.prompt}]
    first = messages.pop(0)["content"] if messages[0]["role"] == "system" else ""
    first = first if system_prompt is None else system_prompt
    if first := f"{first}\n\n{thinking}".strip():
        messages.insert(0, {"role": "system", "content": first})
    return replace(problem, prompt=tuple(messages))


def digest(problem: Problem) -> str:
    """A short name of what a problem asks and how it is answered, whatever its id; the same for
    every tokenizer.

    Examples:
        >>> digest(Problem("1+1=", "2", "a")) == digest(Problem("1+1=", "2", "b"))
        True
        >>> digest(Problem("1+1=", "2", "a")) == digest(Problem("1+2=", "3", "a"))
        False
    """
    asked = json.dumps([problem.prompt, problem.answer, problem.tools], sort_keys=True, default=str)
    return hashlib.sha256(asked.encode()).hexdigest()[:16]


#: Columns that number the rows, or are the messages, of which the system's do not count.
_NOT_ABOUT = ("prompt", "example_id", "id")


def question(problem: Problem) -> tuple[str, ...]:
    """What is asked and the answer, whatever the system says before, for finding it elsewhere.

    Of a conversation with somebody who answers, also what that is about: conversations may begin
    with the same words.

    Examples:
        >>> plain = Problem("1+1=", "2", "a")
        >>> question(plain) == question(framed(plain, system_prompt="Add.", thinking_prompt=True))
        True
    """
    if isinstance(problem.prompt, str):
        return problem.prompt, problem.answer
    about = {} if problem.partner is None else {
        name: value for name, value in problem.row.items() if name not in _NOT_ABOUT}
    return (*(str(message["content"]) for message in problem.prompt
              if message["role"] != "system"), problem.answer,
            *([json.dumps(about, sort_keys=True, default=str)] if about else []))


def template_text(given: str) -> str:
    """The chat template of ``env.chat_template``, a text or a file.

    Raises:
        ValueError: if it is neither, or no template.
    """
    import jinja2

    path, text = Path(given).expanduser(), given
    if "{" not in given:
        if not path.is_file():
            raise ValueError(f"env.chat_template={given}: there is no such file, and it is no "
                             "template; give a file, or a text such as \"{% for message in "
                             "messages %}...\"")
        text = path.read_text(encoding="utf-8")
    try:
        jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(text)
    except jinja2.TemplateSyntaxError as error:
        if "generation" not in str(error):  # a tag that Transformers has of its own
            raise ValueError(f"env.chat_template={given:.60}: not a template: {error}") from error
    return text


def give_template(tokenizer: Any, chosen: str | None, problems: Sequence[Problem]) -> bool:
    """Let a tokenizer render these problems: by the template that is chosen, its own, or where it
    has none and chats are to be rendered, a plain one. True if it got the last.

    It stays with the tokenizer, and is saved with it.

    Raises:
        ValueError: if a template is chosen and there are no chats; see :func:`template_text`.
    """
    chats = not all(isinstance(problem.prompt, str) for problem in problems)
    if chosen is not None:
        if not chats:
            raise ValueError(f"env.chat_template={chosen:.60} is not read because all prompts are "
                             "text; set env.system_prompt, which makes chats of them, or remove it")
        tokenizer.chat_template = template_text(chosen)
    if tokenizer.chat_template is not None or not chats:
        return False
    begins = tokens_before(tokenizer) == [tokenizer.bos_token_id]
    tokenizer.chat_template = begins * "{{ bos_token }}" + _PLAIN_TEMPLATE
    return True


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
                         "chat template; set env.chat_template, or use an instruction-tuned model")
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
    _check_tools(prompts, tokenizer, what=what)
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


def _check_tools(prompts: Sequence[Prompt], tokenizer: Any, *, what: str) -> None:
    """Say so where the model is not told of the tools that it may call."""
    first = next((prompt for prompt in prompts if prompt.problem.tools), None)
    # Twice, as a template that reads them may fail without any.
    if first and first.tokens == render(
            replace(first.problem, tools=first.problem.tools * 2), tokenizer):
        logger.warning("%s: problems have tools, as %r has, but the chat template does not show "
                       "them; set env.chat_template to one that reads tools, or have the prompt "
                       "say what they are", what, first.problem.id)


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

    def at(self, number: int) -> Prompt:
        """The prompt of this number; the stream goes on behind it."""
        self.seek(number)
        return self.take(1)[0]

    def _make_order(self) -> list[int]:
        order = list(range(len(self.prompts)))
        if self.shuffle:
            random.Random(self.seed * 1_000_003 + self.epoch).shuffle(order)
        return order
