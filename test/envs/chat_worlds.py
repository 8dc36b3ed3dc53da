"""Environments of TorchRL of our own, which tests name by import path."""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torch.utils.data import DataLoader
from torchrl.data.llm import History
from torchrl.envs import Transform
from torchrl.envs.llm import ChatEnv


def _batch(rows):
    return torch.stack([TensorDict.from_dict(row) for row in rows])


class Guessing(Transform):
    """Half a point and a hint after a wrong guess, one more and the end after the right one."""

    def _step(self, tensordict, after):
        said = tensordict["history"].full[0].content[-1]
        if said == "fail":
            raise OSError("the disk is full")
        right = said == after["answer"][0]
        after["reward"] = torch.full((1, 1), 1.0 if right else 0.5)
        after["done"] = after["terminated"] = torch.full((1, 1), right)
        if not right and said != "silence":
            hint = History.from_chats([[{"role": "user", "content": f"not {said}"}]])
            after["history"].prompt = after["history"].prompt.extend(hint, inplace=False, dim=-1)
        return after


def guess(highest: int = 9, **options):
    """Which number is meant; it answers until it is said."""
    rows = [{"query": f"guess {n}", "answer": str(n)} for n in range(highest + 1)]
    env = ChatEnv.from_dataloader(DataLoader(rows, batch_size=1, collate_fn=_batch),
                                  batch_size=(1,), **options)
    return env.append_transform(Guessing())


class Sevens(Transform):
    """Rewards the share of sevens in what is said, and ends the conversation."""

    def _step(self, tensordict, after):
        said = tensordict["history"].full[0].content[-1]
        after["reward"] = torch.full((1, 1), said.count("7") / max(1, len(said)))
        after["done"] = after["terminated"] = torch.ones(1, 1, dtype=torch.bool)
        return after


def sevens():
    """Sums, and a reward that knows one digit only."""
    rows = [{"query": f"{a}+{b}="} for a in range(10) for b in range(10)]
    env = ChatEnv.from_dataloader(DataLoader(rows, batch_size=1, collate_fn=_batch),
                                  batch_size=(1,))
    return env.append_transform(Sevens())


def unrewarded():
    """Says nothing of what it is worth."""
    return ChatEnv.from_dataloader(
        DataLoader([{"query": "hello"}] * 3, batch_size=1, collate_fn=_batch), batch_size=(1,))
