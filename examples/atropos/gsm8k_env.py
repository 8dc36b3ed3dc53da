"""GSM8K from local files: word problems, answered between ``<answer>`` and ``</answer>``.

    python gsm8k_env.py serve --env.data_path=FOLDER ...

FOLDER holds ``train.jsonl`` and ``test.jsonl``; a row has ``question`` and ``answer``, whose text
after ``####`` is the number asked for. Cobbe et al., arXiv:2110.14168.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from pathlib import Path

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup
from pydantic import Field

SYSTEM_PROMPT = (
    "Solve the problem step by step. Write your reasoning between <think> and </think>, then only "
    "the final number between <answer> and </answer>."
)
Problem = tuple[str, str]  # question and number


def read_problems(path: Path) -> list[Problem]:
    """Rows of a JSON Lines file.

    Raises:
        FileNotFoundError: naming the file.
        ValueError: naming the line that is no problem.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there; --env.data_path must be a folder with "
                                "train.jsonl and test.jsonl of GSM8K")
    problems = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        row = json.loads(line)
        if not isinstance(row, dict) or not {"question", "answer"} <= row.keys():
            raise ValueError(f"{path}, line {number}: no object with question and answer")
        _, mark, answer = row["answer"].rpartition("####")
        if not mark:
            raise ValueError(f"{path}, line {number}: the answer does not end in '#### number'")
        problems.append((row["question"], normalize(answer)))
    return problems


def normalize(number: str) -> str:
    """One form for numbers that differ in notation: ``$1,080.00`` is ``1080``."""
    number = re.sub(r"[,$%\s]", "", number).rstrip(".")
    return number.rstrip("0").rstrip(".") if "." in number else number


def grade(text: str, answer: str) -> float:
    """1 for the right number in the first answer block, 0.1 for another one, 0 for none."""
    _, opened, rest = text.partition("<answer>")
    content, closed, _ = rest.partition("</answer>")
    if not (opened and closed and content.strip()):
        return 0.0
    return 1.0 if normalize(content) == answer else 0.1


class Gsm8kConfig(BaseEnvConfig):
    data_path: str = Field(default="", description="Folder with train.jsonl and test.jsonl")
    seed: int = Field(default=0, description="Of the order of the problems")
    max_new_tokens: int = Field(default=512, description="Longest reply")
    num_eval: int = Field(default=256, description="Test problems of an evaluation")


class Gsm8kEnv(BaseEnv):
    name = "gsm8k"
    env_config_cls = Gsm8kConfig

    @classmethod
    def config_init(cls) -> tuple[Gsm8kConfig, list[APIServerConfig]]:
        return (
            Gsm8kConfig(group_size=8, max_token_length=1024, total_steps=-1, use_wandb=False,
                        steps_per_eval=0, max_batches_offpolicy=2),
            [APIServerConfig(base_url="http://127.0.0.1:9001/v1", server_type="vllm",
                             api_key="none")],
        )

    async def setup(self) -> None:
        folder = Path(self.config.data_path).expanduser()
        self.train, self.test = (read_problems(folder / f"{s}.jsonl") for s in ("train", "test"))
        random.Random(self.config.seed).shuffle(self.train)
        self.position = 0

    async def get_next_item(self) -> Problem:
        item = self.train[self.position % len(self.train)]
        self.position += 1
        return item

    async def collect_trajectories(self, item: Problem) -> tuple[ScoredDataGroup, list[Problem]]:
        question, answer = item
        async with self.server.managed_server(tokenizer=self.tokenizer) as server:
            completion = await server.chat_completion(
                messages=messages(question), n=self.config.group_size,
                max_tokens=self.config.max_new_tokens, temperature=1.0)
            nodes = server.get_state()["nodes"]
        return ScoredDataGroup(
            tokens=[node.tokens for node in nodes],
            masks=[node.masked_tokens for node in nodes],
            inference_logprobs=[node.logprobs for node in nodes],
            scores=[grade(choice.message.content, answer) for choice in completion.choices],
            generation_params={"temperature": 1.0},
        ), []

    async def evaluate(self, *args: object, **kwargs: object) -> None:
        """Share of the first test problems that greedy decoding solves."""
        solved = await asyncio.gather(
            *(self.solves(*problem) for problem in self.test[: self.config.num_eval]))
        accuracy = sum(solved) / len(solved)
        print(f"test accuracy at step {self.curr_step}: {accuracy:.3f}", flush=True)
        await self.evaluate_log({"accuracy": accuracy})

    async def solves(self, question: str, answer: str) -> bool:
        completion = await self.server.chat_completion(
            messages=messages(question), n=1, max_tokens=self.config.max_new_tokens,
            temperature=0.0, split="eval")
        return grade(completion.choices[0].message.content or "", answer) == 1.0


def messages(question: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}]


if __name__ == "__main__":
    Gsm8kEnv.cli()
