"""TorchRL's own chat environments: their data sets, their side of the conversation, their reward.

An environment is used as it is. Its first message list is the prompt; after each turn of the model
it is given the conversation as a ``History`` and steps. Tokens are none of its business: what the
engine sampled is what is trained, and what the environment says is laid behind it.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import threading
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any

from grpo.envs.tasks.base import Problem, Task, check_count, held_out_count, register_task
from grpo.envs.tasks.sources import read_jsonl
from grpo.system.threads import in_background

#: Where environments of a bare name are.
HOME = "torchrl.envs.llm"
_SECONDS = 3600.0  # of a step where a reward's own deadline comes first
_STEPPING, _LOADING = threading.Lock(), threading.Lock()


@register_task("chat_env")
class ChatEnvTask(Task):
    """Problems of a TorchRL ``ChatEnv`` that draws them from a data set.

    Args:
        id: a class of ``torchrl.envs.llm``, such as ``GSM8KEnv``, or "package.module:function" of
            what makes an environment.
        args: of the class or function. Data sets are read in their order unless it says otherwise.
        data_path: local folder with ``train.jsonl`` and ``test.jsonl``, whose rows stand for those
            of the hub's data set; None: that one.
        num_train: training problems, the first ones; None: all.
        num_test: held-out problems: the first of ``test.jsonl``, or where there is none, the first
            of the data set, which are not trained on. None: 100 of ``test.jsonl``, or of the data
            set a tenth; no more than 100, and no more than there are.

    Raises:
        ValueError: if there is no such environment, it cannot be made, or it is not one that this
            can talk to; if it has fewer problems than asked for, or never runs out of them.
        FileNotFoundError: if the folder or its ``train.jsonl`` is not there.
    """

    default_reward = "verifier"

    def __init__(
        self, *, id: str | None = None, args: Mapping[str, Any] | None = None,
        data_path: str | None = None, num_train: int | None = None, num_test: int | None = None,
    ) -> None:
        for key, value in (("num_train", num_train), ("num_test", num_test)):
            if value is not None:
                check_count(f"env.task.{key}", value)
        if not id:
            raise ValueError("env.id names no environment; give a class of torchrl.envs.llm, such "
                             "as env.id=GSM8KEnv, or the import path of your own, module:function")

        folder = None if data_path is None else str(Path(data_path).expanduser().absolute())
        made_of = partial(_made_of, id, args, folder)
        rows, length = _problems(made_of("train"), "train", endless=num_train is not None)
        held_out = rows
        if folder is not None and Path(folder, "test.jsonl").is_file():
            held_out, length = _problems(made_of("test"), "test")[0], None
        test = list(islice(held_out, held_out_count(num_test, length)))
        train = list(islice(rows, num_train))
        for key, wanted, found in (("num_train", num_train, train), ("num_test", num_test, test)):
            if wanted is not None and len(found) < wanted:
                raise ValueError(f"env.task.{key}={wanted}: env.id={id} has only {len(found)} such "
                                 "problems; ask for fewer")
        super().__init__(train=train, test=test, source=f"the environment {id}")


class ChatTalk:
    """One conversation, a :class:`~grpo.envs.tasks.base.Partner`.

    Whatever fails in the environment ends the conversation, and :meth:`score` raises it: it costs
    this row, as the failure of a reward does.

    Args:
        environment: a TorchRL environment of batch size 1.
        start: what it was reset to.
    """

    def __init__(self, environment: Any, start: Any) -> None:
        self.environment, self._now = environment, start.clone()
        self._rewards: list[float] = []
        self._failure: str | None = None

    def reply(self, text: str, *, truncated: bool, seconds: float) -> list[dict[str, Any]] | None:
        """What the environment says to a turn; None if it is done or says nothing more."""
        try:
            return in_background(self._step, text, seconds).result(seconds)
        except TimeoutError:
            self._failure = f"the environment did not answer within {seconds:g} s"
        except Exception as error:  # somebody's own environment may raise anything
            self._failure = f"the environment failed: {type(error).__name__}: {error}"
        return None

    def stop(self, *, seconds: float) -> None:
        """It was told of every turn; there is nothing to end."""

    def score(self) -> float:
        """The sum of its rewards."""
        if self._failure is None and not self._rewards:
            self._failure = "the environment gives no reward; choose another env.reward"
        if self._failure:
            raise RuntimeError(self._failure)
        return sum(self._rewards)

    def _step(self, text: str, seconds: float) -> list[dict[str, Any]] | None:
        from torchrl.data.llm import History

        prompt = self._now["history"].prompt
        turn = History.from_chats([[{"role": "assistant", "content": text}]])
        self._now["history"].full = prompt.extend(turn, inplace=False, dim=-1)
        known = _messages(self._now["history"].full)
        if not _STEPPING.acquire(timeout=seconds):
            raise TimeoutError(f"another conversation held it for {seconds:g} s")
        try:
            stepped = self.environment.step(self._now)
        finally:
            _STEPPING.release()
        after = stepped["next"]
        if "reward" in after.keys():
            self._rewards.append(float(after["reward"].sum()))
        said = _messages(after["history"].prompt)
        if said[:len(known)] != known:
            raise ValueError("it changes what has been said already, and tokens that were sampled "
                             "stay as they are")
        self._now = self.environment.step_mdp(stepped)
        return None if bool(after["done"].any()) else said[len(known):] or None


def _made_of(id: str, args: Mapping[str, Any] | None, folder: str | None, split: str) -> str:
    """From which any process can make the environment."""
    return json.dumps([id, dict(args or {}), folder, split])


def _problems(
    made_of: str, split: str, *, endless: bool = False
) -> tuple[Iterator[Problem], int | None]:
    """In the environment's order, each once; and how many, None if they never end."""
    environment = _make(made_of)  # one of its own, which stands at its first row
    length = _length(environment)
    if length is None and not endless:
        raise ValueError(f"env.id={json.loads(made_of)[0]} makes problems without end; say how "
                         "many in env.task.num_train")

    def problem(number: int) -> Problem:
        start = environment.reset()
        begin = partial(_begin, made_of, start)
        return Problem(
            prompt=tuple(_messages(start["history"].prompt)), id=f"{split}/{number}",
            answer=_answer(start), partner=begin,
            verifier=partial(_score_of_one_turn, begin))

    return map(problem, count() if length is None else range(length)), length


def _length(environment: Any) -> int | None:
    """Rows of its data set; None if they never end."""
    for transform in environment.transform.modules():
        rows = getattr(getattr(transform, "dataloader", None), "dataset", None)
        if rows is not None:
            return len(rows) if hasattr(rows, "__len__") else None
    raise ValueError(f"{type(environment).__name__} draws its problems from no data set; give one "
                     "made by DatasetChatEnv or ChatEnv.from_dataloader")


def _messages(history: Any) -> list[dict[str, Any]]:
    """Role and text of the messages of the one conversation in a history."""
    roles, contents = history[0].role, history[0].content
    if not all(isinstance(content, str) for content in contents):
        raise ValueError("the environment says something that is no text")
    return [{"role": role, "content": content}
            for role, content in zip(roles, contents, strict=True)]


def _answer(start: Any) -> str:
    """For people and for rewards of one's own; the environment keeps what it compares with."""
    return str(start["answer"][0]) if "answer" in start.keys() else ""


def _begin(made_of: str, start: Any) -> ChatTalk:
    """A conversation. An environment is made once a process, where it is needed."""
    return ChatTalk(_environment(made_of), start)


def _score_of_one_turn(begin: partial, completion: str) -> float:
    """What a conversation is worth that ends after its first turn."""
    talk = begin()
    talk.reply(completion, truncated=False, seconds=_SECONDS)
    return talk.score()


def _environment(made_of: str) -> Any:
    with _LOADING:
        return _kept(made_of)


@functools.cache
def _kept(made_of: str) -> Any:
    return _make(made_of)


def _make(made_of: str) -> Any:
    """A new one of an id, arguments, folder and split."""
    name, args, data_path, split = json.loads(made_of)
    make = _named(name)
    # A class's own call takes anything.
    accepted = inspect.signature(make.__init__ if inspect.isclass(make) else make).parameters
    for key, value in (("shuffle", False), ("seed", 0)):
        if key in accepted:
            args.setdefault(key, value)
    if data_path is not None:
        make = _on_files(make, name, Path(data_path), split)
    try:
        environment = make(**args)
    except (TypeError, ValueError, OSError, ImportError) as error:
        raise ValueError(f"env.id={name}, env.task.args={args}: {type(error).__name__}: {error}"
                         ) from error
    mode = getattr(getattr(environment, "base_env", None), "input_mode", None)
    if mode != "history" or tuple(environment.batch_size) != (1,):
        raise ValueError(f"env.id={name} must be an environment over a ChatEnv with "
                         f"input_mode='history' and one conversation at a time; it has input_mode="
                         f"{mode!r} and batch_size={tuple(environment.batch_size)}")
    return environment


def _named(name: str) -> Any:
    """The class or function of ``env.id``."""
    module, _, attribute = name.rpartition(":")
    try:
        return getattr(importlib.import_module(module or HOME), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"env.id={name}: {error}; give a class of {HOME}, such as GSM8KEnv, or "
                         "the import path of your own, module:function") from error


def _on_files(make: Any, name: str, folder: Path, split: str) -> Any:
    """The same class of environment, on the rows of local files."""
    from torch.utils.data import DataLoader
    from torchrl.envs.llm.chat import DatasetChatEnv

    if not (inspect.isclass(make) and issubclass(make, DatasetChatEnv)):
        raise ValueError(f"env.data_path={folder} is for classes of {HOME} that read a data "
                         f"set, and env.id={name} is none; give it the path in env.task.args")
    rows = [row for _, row in read_jsonl(folder, split)]

    def loader(*, batch_size_dl: int, shuffle: bool, collate_fn: Any, **hub: Any) -> DataLoader:
        return DataLoader(rows, batch_size=batch_size_dl, shuffle=shuffle, collate_fn=collate_fn)

    return type(make.__name__, (make,), {"_dataloader_factory": staticmethod(loader)})
