"""Conversations that are written out by hand: a model that says them, and what a batch of them must
be."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from grpo import data
from grpo.envs.dialog import Dialog, Step
from grpo.envs.prompts import render_all
from grpo.envs.rewards import RewardScorer, get_reward
from grpo.envs.verifiable import VerifiableEnv
from grpo.objectives import GroupAdvantage, GRPOLoss, total_loss
from grpo.policies.base import Completions, Policy, Sampling
from grpo.policies.converse import respond

PAD, EOS = 0, 1
#: Shows tools, and marks where a turn begins and ends.
TEMPLATE = (
    "{% for t in tools or [] %}[{{ t.function.name }}({{ t.function.parameters.properties.keys() | "
    "join }})]{% endfor %}{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}")
#: A conversation, turn by turn: what is said, and whether the model has sampled it. That ends with
#: the model's end token, which a template does not add once more.
Spoken = Sequence[tuple[str, bool]]


class Script(Policy):
    """Says what it is told to, turn by turn; a row is told by what it was asked."""

    def __init__(self, tokenizer, turns: dict[str, list[str]], width: int, max_tokens: int):
        super().__init__(Sampling(max_tokens=max_tokens), pad_token_id=PAD, eos_token_ids=(EOS,),
                         max_model_len=width + max_tokens, version=lambda: 0)
        self.tokenizer = tokenizer
        self.lines = {key: iter(lines) for key, lines in turns.items()}

    def _generate(self, prompts, on_row=None):
        texts = [self.tokenizer.decode(prompt) for prompt in prompts]
        keys = [next(key for key in self.lines if f"<user>{key}" in text or text.startswith(key))
                for text in texts]
        rows = [[*tokens_of(self.tokenizer, next(self.lines[key])), EOS]
                [:self.sampling.max_tokens] for key in keys]
        return Completions(rows, [[-0.5] * len(row) for row in rows],
                           [EOS not in row for row in rows])


def rollout(tokenizer, problems, turns, *, step: Step, reward: str, max_steps=5, max_tokens=400,
            timeout=30.0, repeats=2):
    """A batch of conversations in which the model says so, and its environment."""
    prompts = render_all(problems, tokenizer, max_prompt_tokens=400, what="train")
    score = RewardScorer([(get_reward(reward), 1.0)], timeout=timeout)
    dialog = Dialog(step, tokenizer, score, max_steps=max_steps, max_tokens=max_tokens,
                    eos_token_ids=(EOS,), workers=4)
    width = max(len(prompt.tokens) for prompt in prompts)
    env = VerifiableEnv(prompts, score, tokenizer, num_prompts=len(prompts), group_size=repeats,
                        max_prompt_tokens=width, max_response_tokens=max_tokens,
                        eos_token_ids=(EOS,), shuffle=repeats > 1, dialog=dialog)
    policy = Script(tokenizer, turns, width, max_tokens)
    return env.step(respond(policy, env, env.reset())), env


def tokens_of(tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def check_masks(batch, tokenizer, spoken: Sequence[Spoken]) -> None:
    """The tokens of a batch are those of the conversations, and what was sampled is marked."""
    for i, turns in enumerate(spoken):
        tokens = [(token, sampled) for text, sampled in turns
                  for token in tokens_of(tokenizer, text)]
        count = len(tokens)
        assert batch[data.TOKENS][i, :count].tolist() == [token for token, _ in tokens]
        assert batch[data.ASSISTANT_MASK][i, :count].tolist() == [kept for _, kept in tokens]
        assert not batch[data.ASSISTANT_MASK][i, count:].any()


def turn_log_probs(model, tokenizer, turns: Spoken) -> torch.Tensor:
    """Of what was sampled, turn by turn, each after all that was said before it."""
    said_before, out = [], []
    for text, sampled in turns:
        tokens = tokens_of(tokenizer, text)
        if sampled:
            logits = model(input_ids=torch.tensor([said_before + tokens])).logits[0]
            log_probs = logits[len(said_before) - 1 : -1].log_softmax(-1)
            out.append(log_probs.gather(-1, torch.tensor(tokens)[:, None])[:, 0])
        said_before = said_before + tokens
    return torch.cat(out)


def check_gradient(
    batch, model, tokenizer, spoken: Sequence[Spoken], advantage: Sequence[float]
) -> None:
    """The loss's gradient is that of the turns walked by hand, with the advantage of each row."""
    model, clip = model.double().requires_grad_(True), 0.2

    def gradient(value: torch.Tensor) -> torch.Tensor:
        return torch.cat([g.flatten() for g in torch.autograd.grad(value, [*model.parameters()])])

    scores = [turn_log_probs(model, tokenizer, turns) for turns in spoken]
    # A policy that has moved on since: some ratios are clipped, some not.
    counts = [*map(len, scores)]
    moved = torch.linspace(-0.4, 0.4, sum(counts))[
        torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0))]
    sampled = (torch.cat(scores).detach() + moved).float()
    terms = []
    for row, old, weight in zip(scores, sampled.split(counts), advantage, strict=True):
        ratio = (row - old.double()).exp()
        terms.append(torch.minimum(ratio * weight, ratio.clamp(1 - clip, 1 + clip) * weight))
    by_hand = gradient(-torch.cat(terms).mean())

    def ours(batch) -> torch.Tensor:
        GroupAdvantage(estimator="group_mean")(batch)
        loss = GRPOLoss(model, clip_epsilon=clip, pad_token_id=PAD)
        return gradient(total_loss(loss(batch)))

    log_probs = torch.zeros_like(batch[data.LOG_PROBS])
    log_probs[batch[data.ASSISTANT_MASK]] = sampled
    batch[data.LOG_PROBS] = log_probs
    found = ours(batch.clone())
    assert by_hand.norm() > 1e-3
    assert (found - by_hand).norm() < 1e-6 * by_hand.norm()
    # What others say between the turns is in it, if its tokens count as sampled.
    answers = batch.clone()
    begun = answers[data.ASSISTANT_MASK].cumsum(-1) > 0
    answers[data.ASSISTANT_MASK] = begun & answers[data.ATTENTION_MASK]
    assert (ours(answers) - by_hand).norm() > 1e-2 * by_hand.norm()
