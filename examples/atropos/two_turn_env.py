"""Additions with a second try: the model answers, hears whether it was right, and answers again.

Both answers are trained; the question and the verdict between them are not. A conversation is one
sequence, whose tokens are those of the two replies exactly.
"""

from __future__ import annotations

import asyncio

from arithmetic_env import ArithmeticConfig, ArithmeticEnv, Problem
from atroposlib.envs.base import ScoredDataGroup
from atroposlib.envs.server_handling.managed_server import SequenceNode
from pydantic import Field

VERDICTS = {True: "Right. Say it again.", False: "Wrong. Try again."}


def score(first: str, second: str, answer: str) -> float:
    """1 for a right last answer, half of that for a right first one; closeness breaks ties."""
    right = [reply.strip() == answer for reply in (first, second)]
    close = sum(a == b for a, b in zip(second.strip(), answer, strict=False)) / len(answer)
    return right[1] + 0.5 * right[0] + 0.1 * close


class TwoTurnConfig(ArithmeticConfig):
    max_new_tokens: int = Field(default=8, description="Longest answer of a turn")


class TwoTurnEnv(ArithmeticEnv):
    name = "two_turn"
    env_config_cls = TwoTurnConfig

    @classmethod
    def config_init(cls):
        config, servers = super().config_init()
        return config.model_copy(update={"group_size": 4, "max_token_length": 256}), servers

    async def collect_trajectories(self, item: Problem) -> tuple[ScoredDataGroup, list[Problem]]:
        conversations = await asyncio.gather(
            *(self.converse(*item) for _ in range(self.config.group_size)))
        nodes, scores = zip(*conversations, strict=True)
        return ScoredDataGroup(
            tokens=[node.tokens for node in nodes],
            masks=[node.masked_tokens for node in nodes],
            inference_logprobs=[node.logprobs for node in nodes],
            scores=list(scores),
            generation_params={"temperature": self.config.temperature},
        ), []

    async def converse(self, prompt: str, answer: str) -> tuple[SequenceNode, float]:
        """Two turns; the sequence of both, and its score."""
        messages, replies = [{"role": "user", "content": prompt}], []
        # A server for each conversation: one for all would take a sibling's with the same first
        # reply for the beginning of this one.
        async with self.server.managed_server(tokenizer=self.tokenizer) as server:
            for _ in range(2):
                completion = await server.chat_completion(
                    messages=messages, n=1, max_tokens=self.config.max_new_tokens,
                    temperature=self.config.temperature)
                replies.append(completion.choices[0].message.content)
                verdict = VERDICTS[replies[-1].strip() == answer]
                messages += [{"role": "assistant", "content": replies[-1]},
                             {"role": "user", "content": verdict}]
            nodes = server.get_state()["nodes"]
        if len(nodes) != 1:
            raise ValueError("the chat template changed the first turn when the second was added, "
                             "so the two are no one sequence; use another model")
        return nodes[0], score(*replies, answer)


if __name__ == "__main__":
    TwoTurnEnv.cli()
