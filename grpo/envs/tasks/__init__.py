"""Tasks: problems with a known answer, split into train and test."""

from grpo.envs.tasks.arithmetic import ArithmeticTask
from grpo.envs.tasks.base import (
    Problem,
    Task,
    make_task,
    options_of,
    register_task,
    task_class,
    task_names,
)
from grpo.envs.tasks.chat_env import ChatEnvTask
from grpo.envs.tasks.countdown import CountdownTask
from grpo.envs.tasks.dataset import DatasetTask
from grpo.envs.tasks.gsm8k import Gsm8kTask
from grpo.envs.tasks.ifeval import IFEvalTask
from grpo.envs.tasks.reasoning_gym import ReasoningGymTask
from grpo.envs.tasks.sat import SatTask
from grpo.envs.tasks.verifiers import VerifiersTask

__all__ = ["ArithmeticTask", "ChatEnvTask", "CountdownTask", "DatasetTask", "Gsm8kTask",
           "IFEvalTask", "Problem", "ReasoningGymTask", "SatTask", "Task", "VerifiersTask",
           "make_task", "options_of", "register_task", "task_class", "task_names"]
