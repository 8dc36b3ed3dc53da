"""Section ``env`` of the configuration."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from grpo.config.keys import ATROPOS
from grpo.config.section import Section
from grpo.config.unread import Unread, only_with

_ATROPOS = Unread(lambda c: not c.env.is_atropos, "by env.dataset={env.dataset}; use env=atropos, "
                  "or")
#: What such environments do themselves, and what is used instead.
_INSTEAD = {
    "env.name env.id env.data_path env.path env.dataset_mixture env.prompt_column "
    "env.answer_column env.system_prompt env.thinking_prompt env.chat_template env.step "
    "env.reward env.reward_weights env.reward_options env.reward_timeout env.reward_workers "
    "env.reward_processes env.reward_memory "
    "env.max_reward_errors env.max_prompt_tokens":
        "options of the environment in env.task.flags, such as {env: {max_num_workers: 8}},",
    "train.data_epochs": "train.max_steps, because environments choose their problems,",
    "train.max_sampling_rounds": "the environment's ensure_scores_are_not_same",
    "train.overlong_buffer": "the environment's own length penalty",
    "train.group_deadline train.oversample":
        "max_num_workers of the environment, which begins its groups itself,",
    "train.eval_frequency logging.num_samples eval.*": "steps_per_eval of the environment",
    "inference_model.max_tokens":
        "the environment's own, and inference_model.max_model_len for the longest row,",
    "inference_model.ignore_eos": "the environment's own options of sampling",
}
#: Of the scripts' runs on Atropos environments.
WITH_ATROPOS = (
    *(Unread(lambda c: c.env.is_atropos, f"with env=atropos; use {instead} and", keys)
      for keys, instead in _INSTEAD.items()),
    Unread(lambda c: c.env.is_atropos and c.inference_model.server != "own",
           "with env=atropos, whose engine is a server of this library; start one (python -m "
           "grpo.server.serve), and", "inference_model.server inference_model.connections"),
    Unread(lambda c: c.env.is_atropos and c.env.task.get("flags") and c.env.environment is None,
           "without env.environment, because the environment runs already; give it these flags "
           "where it is started, and", "env.task"))


class EnvConfig(Section):
    """Problems, groups and rewards."""

    dataset: str = "arithmetic"
    name: str | list[str] | dict[str, float] | None = None
    """What reasoning_gym's problems are: a data set, several, or {data set: weight}."""
    id: str | None = None
    """Of an environment: of verifiers, the module with its ``load_environment``; of TorchRL, a
    class of ``torchrl.envs.llm`` or the import path of what makes one."""
    url: Annotated[str | None, _ATROPOS] = None
    """Of the Atropos API, a hub or atroposlib's ``run-api``; null: the run starts a hub."""
    environment: Annotated[str | None, _ATROPOS] = None
    """Python file of an Atropos environment, which is started and ended with the run; null:
    environments run elsewhere."""
    port: Annotated[int | None, _ATROPOS] = Field(None, ge=1, le=65535)
    """Of this machine, where Atropos environments ask the policy; null: 9001, for one that the run
    starts a free one."""
    forward_ports: Annotated[list[int], _ATROPOS] = Field(default_factory=list)
    """Further ports that lead there, for Atropos environments that ask at an address of their
    own."""
    data_path: str | None = None
    path: str | None = None
    """Of a data set, for ``env=dataset``: id on the hub, a local file, or a folder."""
    dataset_mixture: dict[str, Any] | None = None
    """Several data sets in its place, see :class:`grpo.envs.tasks.dataset.DatasetTask`."""
    prompt_column: str | None = None
    """Of the data set, with a text or a list of chat messages."""
    answer_column: str | None = None
    """Of the data set, with a text or a number."""
    task: dict[str, Any] = Field(default_factory=dict)
    """Options of the task, see :mod:`grpo.envs.tasks`; with Atropos ``flags``, of the ``serve``
    command of ``environment``."""
    system_prompt: str | None = None
    """First message of every prompt; null: the task's own, if it has one; "": none. A prompt that
    is a text is the user's message then."""
    thinking_prompt: bool | str | None = None
    """Added to the first message: a text that asks to think before the answer; true: one that
    does so between ``<think>`` and ``</think>``."""
    chat_template: str | None = None
    """Text or file of a chat template in the place of the tokenizer's; null: that one, and where it
    has none a plain one. It is saved with the tokenizer."""
    reward: str | list[str] | dict[str, float] | None = None
    """Name or import path of the reward, or several; null: the task's own."""
    reward_weights: list[float] | None = None
    """Of a list of rewards, in its order; null: 1 each."""
    reward_options: dict[str, dict[str, Any]] | None = None
    """Of rewards that have some, by the reward's name: their keyword-only parameters."""
    reward_timeout: float = Field(30.0, gt=0)
    """Seconds that a call of a reward function may take, for one completion or for the list that
    it takes; then the row, or all of the list, has no reward."""
    reward_workers: int = Field(16, ge=1)
    """Calls of reward functions at a time; 1: in order, each in the main thread."""
    reward_processes: int | None = Field(None, ge=0)
    """In which functions are called that may not come back; 0: in threads of the run, but for those
    that need one; null: as many as ``reward_workers``, where these are several."""
    reward_memory: float | None = Field(4.0, gt=0)
    """GiB that such a process may take besides what it begins with; null: what there is. Refused
    where no reward is called in one."""
    max_reward_errors: float = Field(0.5, ge=0, le=1)
    """Greatest share of a batch for which reward functions may fail or be late; above it the run
    ends and says why. Failed rows below it leave the advantage and the loss."""
    step: str | None = None
    """What answers the model after its turn: ``retry``, ``environment`` (that of the problems), or
    the import path of a function of a :class:`~grpo.envs.dialog.DialogState`; null: nobody, a
    completion is one turn."""
    max_steps: Annotated[int, only_with("env.step")] = Field(2, ge=1)
    """Turns of the model in a completion, at most; 1 where ``environment`` answers, which is told
    of the last one, too. With the messages between them they share
    ``inference_model.max_tokens``."""
    num_envs: int = Field(32, ge=1)
    """Different prompts a batch."""
    repeats: int = Field(16, ge=2)
    """Completions of each prompt: the group size."""
    max_prompt_tokens: int | None = Field(None, ge=1)
    """Longer prompts are skipped and counted; null: what the context leaves."""

    @model_validator(mode="after")
    def _atropos_is_somewhere(self) -> EnvConfig:
        if self.is_atropos and self.url is None and self.environment is None:
            raise ValueError("env=atropos needs to know where groups come from: give "
                             "env.environment=path/to/env.py, which starts a hub and that "
                             "environment, or env.url=http://127.0.0.1:8000 of a hub that runs")
        if self.is_atropos and (others := self.task.keys() - {"flags"}):
            raise ValueError(f"env.task has {', '.join(sorted(others))}, but with env=atropos it "
                             "has flags alone, those of the environment's serve command, such as "
                             "env.task.flags={env: {max_num_workers: 8}}")
        return self

    @model_validator(mode="after")
    def _the_step_is_asked(self) -> EnvConfig:
        if self.max_steps == 1 and self.step not in (None, "environment"):
            raise ValueError("env.max_steps=1 is the one turn of the model, behind which env.step="
                             f"{self.step} is never asked; set 2 or more, or env.step to null")
        return self

    @model_validator(mode="after")
    def _every_weight_has_a_reward(self) -> EnvConfig:
        names = self.reward if isinstance(self.reward, list) else None
        named = [self.reward] if isinstance(self.reward, str) else list(self.reward or ())
        if self.reward is not None and not (named and all(named) and len(named) == len(set(named))):
            raise ValueError(f"env.reward={self.reward!r} must name at least one reward, and none "
                             "twice; null for the task's own")
        if self.reward_weights is not None and len(self.reward_weights) != len(names or ()):
            raise ValueError(f"env.reward_weights={self.reward_weights} needs a list env.reward "
                             f"of as many names, not {self.reward!r}; give one weight for each")
        return self

    @property
    def is_atropos(self) -> bool:
        """Whether groups come from Atropos environments."""
        return self.dataset == ATROPOS

    def weighted_rewards(self, default: str) -> dict[str, float]:
        """Names of the rewards and their weights in the sum."""
        chosen = default if self.reward is None else self.reward
        if isinstance(chosen, list):
            return dict(zip(chosen, self.reward_weights or [1.0] * len(chosen), strict=True))
        return chosen if isinstance(chosen, dict) else {chosen: 1.0}
