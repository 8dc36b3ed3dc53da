"""Additions of two numbers, ``07+35=``: an Atropos environment that a CPU can learn.

Prompts are plain text and answers have a fixed width, as in `grpo.envs.tasks.arithmetic`, so that
the embedded model of this library knows the format. The numbers are drawn as there too: the
problems that it keeps for testing are never sampled here, and `evaluate` asks exactly those.

Runs in the environments' virtual environment (`make atropos-env`), against `run-api` or a hub:

    python arithmetic_env.py serve --env.rollout_server_url=http://127.0.0.1:8000 \
        --openai.base_url=http://127.0.0.1:9001/v1 --openai.model_name=MODEL \
        --env.tokenizer_name=FOLDER --openai.tokenizer_name=FOLDER
"""

from __future__ import annotations

import asyncio
import random

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup
from pydantic import Field

Problem = tuple[str, str]  # prompt and answer


def additions(*, max_operand: int, seed: int, num_test: int) -> tuple[list[Problem], list[Problem]]:
    """Training and test problems; a sum and its mirror image are never on different sides."""
    pairs = [(a, b) for a in range(max_operand + 1) for b in range(a, max_operand + 1)]
    random.Random(seed).shuffle(pairs)
    pairs = [pair for a, b in pairs for pair in sorted({(a, b), (b, a)})]
    test, train = pairs[:num_test], pairs[num_test:]
    if test and train and train[0] == test[-1][::-1]:
        del train[0]
    width, answer_width = len(str(max_operand)), len(str(2 * max_operand))
    return tuple([(f"{a:0{width}d}+{b:0{width}d}=", f"{a + b:0{answer_width}d}") for a, b in split]
                 for split in (train, test))


class ArithmeticConfig(BaseEnvConfig):
    max_operand: int = Field(default=49, description="Largest number; the smallest is 0")
    seed: int = Field(default=0, description="Of the split into training and test problems")
    num_test: int = Field(default=256, description="Problems kept for testing")
    max_new_tokens: int = Field(default=4, description="Longest answer")
    temperature: float = Field(default=1.0, description="Of the sampling")


class ArithmeticEnv(BaseEnv):
    name = "arithmetic"
    env_config_cls = ArithmeticConfig

    @classmethod
    def config_init(cls) -> tuple[ArithmeticConfig, list[APIServerConfig]]:
        return (
            cls.env_config_cls(group_size=8, max_token_length=64, total_steps=-1, use_wandb=False,
                               steps_per_eval=0, max_batches_offpolicy=2),
            [APIServerConfig(base_url="http://127.0.0.1:9001/v1", server_type="vllm",
                             api_key="none")],
        )

    async def setup(self) -> None:
        config = self.config
        self.train, self.test = additions(max_operand=config.max_operand, seed=config.seed,
                                          num_test=config.num_test)
        self.random = random.Random()  # another order in each process and after each restart
        self.accuracy: float | None = None

    async def get_next_item(self) -> Problem:
        return self.random.choice(self.train)

    async def collect_trajectories(self, item: Problem) -> tuple[ScoredDataGroup, list[Problem]]:
        prompt, answer = item
        async with self.server.managed_server(tokenizer=self.tokenizer) as server:
            completion = await server.completion(
                prompt=prompt, n=self.config.group_size, max_tokens=self.config.max_new_tokens,
                temperature=self.config.temperature)
            nodes = server.get_state()["nodes"]
        # Nodes hold the sampled tokens and their log-probs as the engine returned them.
        return ScoredDataGroup(
            tokens=[node.tokens for node in nodes],
            masks=[node.masked_tokens for node in nodes],
            inference_logprobs=[node.logprobs for node in nodes],
            scores=[float(choice.text.strip() == answer) for choice in completion.choices],
            generation_params={"temperature": self.config.temperature},
        ), []

    async def evaluate(self, *args: object, **kwargs: object) -> None:
        """Share of test problems that greedy decoding solves."""
        solved = await asyncio.gather(*(self.solves(*problem) for problem in self.test))
        self.accuracy = sum(solved) / len(solved)
        print(f"test accuracy at step {self.curr_step}: {self.accuracy:.3f}", flush=True)
        await self.evaluate_log({"accuracy": self.accuracy})

    async def solves(self, prompt: str, answer: str) -> bool:
        completion = await self.server.completion(
            prompt=prompt, n=1, max_tokens=self.config.max_new_tokens, temperature=0.0,
            split="eval")
        return completion.choices[0].text.strip() == answer

    async def wandb_log(self, wandb_metrics: dict | None = None) -> None:
        metrics = dict(wandb_metrics or {})
        if self.accuracy is not None:
            metrics["eval/accuracy"], self.accuracy = self.accuracy, None
        await super().wandb_log(metrics)


if __name__ == "__main__":
    ArithmeticEnv.cli()
