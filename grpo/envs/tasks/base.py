"""What a task is, and the registry that builds one from its name and options."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol, TypeVar

from grpo.system.annotations import check_types

#: Held-out problems, at most, where nothing says how many.
NUM_TEST = 100


class Partner(Protocol):
    """The other side of one conversation, which keeps what it needs between the turns."""

    def reply(self, text: str, *, truncated: bool, seconds: float) -> list[dict[str, Any]] | None:
        """Messages in answer to a turn of the model, which the length limit may have cut; None if
        the conversation is over. Takes at most so many seconds."""

    def stop(self, *, seconds: float) -> None:
        """The model will say no more."""

    def score(self) -> float:
        """What the conversation is worth, once it is over.

        Raises:
            RuntimeError: if the partner cannot say.
        """


@dataclass(frozen=True)
class Problem:
    """One question with a known answer.

    Attributes:
        prompt: text that the model continues, which begins as the tokenizer lets every text begin
            (see :func:`grpo.envs.text_tokens.text_tokens`), or chat messages
            (``{"role": ..., "content": ...}``) that are rendered with its chat template.
        answer: what a reward function compares a completion with.
        id: unique within the task; names the problem in logs and error messages.
        verifier: what a completion is worth, from 0 to 1, for problems that have a rule of their
            own; the reward "verifier" asks it.
        tools: that the prompt offers, as chat templates take them.
        partner: begins a conversation, for problems with somebody who answers the model; the step
            "environment" lets it speak.
        row: all columns of the data set that it is from, for rewards of one's own; of tasks that
            know none, empty.
    """

    prompt: str | tuple[dict[str, str], ...] = field(hash=False)  # dicts have no hash
    answer: str
    id: str
    verifier: Callable[[str], float] | None = field(default=None, compare=False, repr=False)
    tools: tuple[dict[str, Any], ...] = field(default=(), hash=False, repr=False)
    partner: Callable[[], Partner] | None = field(default=None, compare=False, repr=False)
    row: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)


class Task:
    """Base class of tasks: a name, two splits and the reward that suits them.

    A subclass sets ``default_reward``, takes keyword-only options, and passes its problems here.

    Args:
        train: problems to learn from.
        test: held-out problems.
        source: where the problems come from, for error messages.

    Attributes:
        name: set by :func:`register_task`.
        default_reward: name of a reward function, see :func:`grpo.envs.rewards.get_reward`.

    Examples:
        >>> class Capitals(Task):
        ...     default_reward = "exact_match"
        >>> france = Problem(prompt="Capital of France: ", answer="Paris", id="france")
        >>> task = Capitals(train=[france], test=[], source="an atlas")
        >>> task.split("train")[0].answer
        'Paris'
    """

    name: ClassVar[str] = "unregistered"
    default_reward: ClassVar[str]

    def __init__(self, *, train: Sequence[Problem], test: Sequence[Problem], source: str) -> None:
        self.train, self.test, self.source = tuple(train), tuple(test), source

    def system_message(self, asked: str) -> str:
        """What ``env.system_prompt`` stands for, which a task may know by a name."""
        return asked

    def check_answers(self, reward: str) -> None:
        """Refuse problems without answers, where a reward of this name compares with them.

        Raises:
            ValueError: if no problem has an answer.
        """
        if not any(problem.answer for problem in (*self.train, *self.test)):
            raise ValueError(f"env.reward={reward} compares completions with answers, and no "
                             f"problem of {self.source} has one; choose another env.reward")

    def split(self, name: Literal["train", "test"]) -> tuple[Problem, ...]:
        """The problems of one split, never empty.

        Raises:
            ValueError: if there is no such split, or it holds no problem.
        """
        if name not in ("train", "test"):
            raise ValueError(f"task {self.name!r} has no split {name!r}; use 'train' or 'test'")
        problems = self.train if name == "train" else self.test
        if not problems:
            raise ValueError(
                f"task {self.name!r}: split {name!r} is empty (source: {self.source}); "
                f"set num_{name} to at least 1, or use a source that has {name} problems")
        return problems


TaskClass = TypeVar("TaskClass", bound=type[Task])

_TASKS: dict[str, type[Task]] = {}


def register_task(name: str) -> Callable[[TaskClass], TaskClass]:
    """Class decorator that makes a :class:`Task` available to :func:`make_task`.

    Raises:
        ValueError: if the name is taken.

    Examples:
        >>> @register_task("echo")
        ... class Echo(Task):
        ...     default_reward = "exact_match"
        ...     def __init__(self, *, word="hello"):
        ...         problem = Problem(prompt=f"Say {word}: ", answer=word, id=word)
        ...         super().__init__(train=[problem], test=[problem], source="echo")
        >>> make_task("echo", word="moin").train[0].answer
        'moin'
    """

    def register(cls: TaskClass) -> TaskClass:
        if name in _TASKS:
            raise ValueError(f"task {name!r} is already registered by {_TASKS[name].__qualname__}; "
                             "choose another name")
        cls.name = name
        _TASKS[name] = cls
        return cls

    return register


def task_names() -> tuple[str, ...]:
    """Names that :func:`make_task` knows, sorted."""
    return tuple(sorted(_TASKS))


def task_class(name: str) -> type[Task]:
    """The class of a task, for what is known without its problems.

    Raises:
        ValueError: if the task is unknown.
    """
    if name not in _TASKS:
        raise ValueError(f"unknown task {name!r}; known tasks: {', '.join(task_names())}")
    return _TASKS[name]


def options_of(name: str) -> tuple[str, ...]:
    """Names of the options of a task.

    Raises:
        ValueError: if the task is unknown.

    Examples:
        >>> options_of("arithmetic")
        ('max_operand', 'operators', 'seed', 'num_train', 'num_test')
    """
    parameters = inspect.signature(task_class(name)).parameters.values()
    return tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)


def check_options(name: str, options: Mapping[str, object]) -> None:
    """Check a task's name, the names of its options and their types, without loading anything.

    Raises:
        ValueError: if the task is unknown, or has no such option (it would be ignored), or one with
            another type than the annotation's.
    """
    accepted = options_of(name)
    for option, value in options.items():
        if option not in accepted:
            raise ValueError(f"task {name!r} has no option {option!r} (given {value!r}); "
                             f"remove it, or use one of: {', '.join(accepted) or '(none)'}")
    check_types(task_class(name), options, "env.task.")


def make_task(name: str, /, **options: object) -> Task:
    """Build a registered task with options of its constructor.

    Raises:
        ValueError: see :func:`check_options`.

    Examples:
        >>> make_task("arithmetic", max_operand=9, num_train=80, num_test=10).name
        'arithmetic'
    """
    check_options(name, options)
    return _TASKS[name](**options)


def check_count(field_name: str, value: object, *, minimum: int = 0) -> None:
    """Raise ``ValueError`` unless ``value`` is an integer of at least ``minimum``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ValueError(f"{field_name}={value!r} must be an integer of at least {minimum}")


def held_out_count(num_test: int | None, problems: int | None) -> int:
    """How many problems are held out, at most: as many as is said, or else a tenth, at least one.

    Args:
        num_test: how many are asked for.
        problems: how many there are to take them from; None: no end of them, or they are in a set
            of their own, of which no tenth is taken.

    Examples:
        >>> [held_out_count(None, count) for count in (4, 250, 5000, None)]
        [1, 25, 100, 100]
        >>> held_out_count(7, 250)
        7
    """
    if num_test is not None:
        return num_test
    return NUM_TEST if problems is None else min(NUM_TEST, max(1, problems // 10))
