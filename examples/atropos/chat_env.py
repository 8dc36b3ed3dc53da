"""Additions by chat completions, without log-probs: how most of the public environments work.

The text comes back through the OpenAI client and is tokenized again for the trainer, which has to
find out the log-probs itself.
"""

from __future__ import annotations

from arithmetic_env import ArithmeticConfig, ArithmeticEnv, Problem
from atroposlib.envs.base import ScoredDataGroup
from atroposlib.utils.tokenize_for_trainer import tokenize_for_trainer
from pydantic import Field


class ChatConfig(ArithmeticConfig):
    max_new_tokens: int = Field(default=16, description="Longest reply")


class ChatEnv(ArithmeticEnv):
    name = "chat"
    env_config_cls = ChatConfig

    @classmethod
    def config_init(cls):
        config, servers = super().config_init()
        return config.model_copy(update={"max_token_length": 128}), servers

    async def collect_trajectories(self, item: Problem) -> tuple[ScoredDataGroup, list[Problem]]:
        prompt, answer = item
        question = {"role": "user", "content": prompt}
        completion = await self.server.chat_completion(
            messages=[question], n=self.config.group_size, max_tokens=self.config.max_new_tokens,
            temperature=self.config.temperature)
        group = ScoredDataGroup(tokens=[], masks=[], scores=[])
        for choice in completion.choices:
            text = choice.message.content or ""
            row = tokenize_for_trainer(
                self.tokenizer, [question, {"role": "assistant", "content": text}],
                finish_reason=choice.finish_reason)
            group["tokens"].append(row["tokens"])
            group["masks"].append(row["masks"])
            group["scores"].append(grade(text, answer))
        return group, []


def grade(text: str, answer: str) -> float:
    """1 for the answer alone, else up to 0.2: the share of digits in the text."""
    if text.strip() == answer:
        return 1.0
    return 0.2 * sum(character.isdigit() for character in text) / max(1, len(text))


if __name__ == "__main__":
    ChatEnv.cli()
