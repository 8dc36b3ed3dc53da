"""The bridge as a TorchRL environment, for programs that are no run of this library: those answer
through :mod:`grpo.atropos.bridge_driver`, row by row."""

from __future__ import annotations

import itertools

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torchrl.data import Bounded, Categorical, Composite, Unbounded
from torchrl.envs import EnvBase

from grpo import data
from grpo.atropos.bridge import Bridge
from grpo.atropos.calls import Call
from grpo.policies.base import Policy

ACTIVE = "active"
TEMPERATURE = ("request", "temperature")
MAX_TOKENS = ("request", "max_tokens")


class AtroposBridgeEnv(EnvBase):
    """The inference requests that unmodified Atropos environments make, a batch at a time.

    An observation is a batch of prompts that environments want continued, an action their
    continuations, and every row an episode of one step. No step waits for a reward, because an
    environment scores a group when all its rows and turns are there, or never: rows come with
    ``reward_error`` set. What was sampled is kept in ``bridge.records``, where a scored group finds
    it (:class:`~grpo.atropos.collector.AtroposCollector`).

    A batch that environments do not fill has rows with ``"active"`` False, whose prompt is one
    padding token; their action is ignored. A row also has what its request asks for,
    ``("request", "temperature")`` float32 ``[B, 1]`` and ``("request", "max_tokens")`` int64
    ``[B, 1]``; :class:`RequestedSampling` makes a policy heed it.

    Args:
        bridge: where requests arrive.
        rows: ``B``, requests of a batch.
        max_prompt_tokens: ``P``; requests with longer prompts are refused.
        max_response_tokens: ``R``; replies are at most so long.
        pad_token_id: fill value of the token tensors.
        linger: seconds to wait for further requests after the first one of a batch.
        timeout: seconds that :meth:`reset` waits for the first request.

    Raises:
        TimeoutError: from :meth:`reset`.

    Examples:
        >>> env = AtroposBridgeEnv(bridge, rows=32, max_prompt_tokens=256,
        ...                        max_response_tokens=64, pad_token_id=0)    # doctest: +SKIP
        >>> env.rollout(1, RequestedSampling(policy))                         # doctest: +SKIP
    """

    def __init__(
        self,
        bridge: Bridge,
        *,
        rows: int,
        max_prompt_tokens: int,
        max_response_tokens: int,
        pad_token_id: int,
        linger: float = 0.005,
        timeout: float = 600.0,
    ) -> None:
        for name, value in (("rows", rows), ("max_prompt_tokens", max_prompt_tokens),
                            ("max_response_tokens", max_response_tokens)):
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        super().__init__(device=torch.device("cpu"), batch_size=torch.Size([rows]))
        self.bridge, self.linger, self.timeout = bridge, linger, timeout
        self.max_prompt_tokens, self.max_response_tokens = max_prompt_tokens, max_response_tokens
        self.pad_token_id = pad_token_id
        self.groups_started = 0
        self._calls: list[Call] = []  # of the present batch
        self._next: list[Call] = []  # of the next one
        self._make_specs()

    def _make_specs(self) -> None:
        rows = self.batch_size[0]

        def tokens(width: int) -> Bounded:
            return Bounded(0, self.bridge.vocab_size - 1, shape=(rows, width), dtype=torch.int64)

        def flags(*shape: int) -> Categorical:
            return Categorical(2, shape=(rows, *shape), dtype=torch.bool)

        batch = {"shape": self.batch_size}
        self.observation_spec = Composite(
            tokens=Composite(prompt=tokens(self.max_prompt_tokens), **batch),
            masks=Composite(prompt_attention_mask=flags(self.max_prompt_tokens), **batch),
            request=Composite(
                temperature=Unbounded(shape=(rows, 1), dtype=torch.float32),
                max_tokens=Unbounded(shape=(rows, 1), dtype=torch.int64), **batch),
            group_id=Unbounded(shape=(rows,), dtype=torch.int64),
            active=flags(1), reward_error=flags(1), success=flags(1), **batch)
        self.action_spec = Composite(
            tokens=Composite(response=tokens(self.max_response_tokens), **batch), **batch)
        self.reward_spec = Unbounded(shape=(rows, 1), dtype=torch.float32)
        self.done_spec = Composite(done=flags(1), terminated=flags(1), truncated=flags(1), **batch)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs) -> TensorDictBase:
        if tensordict is not None and not tensordict.get("_reset", torch.ones(1)).all():
            raise ValueError("AtroposBridgeEnv resets whole batches; got a partial '_reset' mask")
        self.bridge.put_back(self._calls)  # those that nobody has replied to
        if not self.poll(self.timeout):
            raise TimeoutError(
                f"no environment asked for a continuation within {self.timeout:g} s; check that "
                "one runs, and that the URL of its inference server is that of the bridge")
        self._calls, self._next = self._next, []
        prompts = [call.prompt for call in self._calls]
        prompts += [[self.pad_token_id]] * (self.batch_size[0] - len(prompts))
        sizes = torch.tensor([len(prompt) for prompt in prompts])
        out = TensorDict({}, batch_size=self.batch_size)
        out[data.PROMPT_TOKENS] = data.pad_rows(prompts, self.max_prompt_tokens, self.pad_token_id)
        out[data.PROMPT_MASK] = torch.arange(self.max_prompt_tokens) < sizes[:, None]
        out[ACTIVE] = (torch.arange(self.batch_size[0]) < len(self._calls))[:, None]
        out[TEMPERATURE] = torch.ones(self.batch_size[0], 1)
        out[MAX_TOKENS] = torch.ones(self.batch_size[0], 1, dtype=torch.int64)
        for i, call in enumerate(self._calls):
            out[TEMPERATURE][i] = call.ask.fields.temperature
            out[MAX_TOKENS][i] = min(call.max_tokens, self.max_response_tokens)
        # Which requests form a group is known only when its scores arrive.
        out[data.GROUP_ID] = self.groups_started + torch.arange(self.batch_size[0])
        self.groups_started += self.batch_size[0]
        return self._unrewarded(out)

    def poll(self, timeout: float) -> bool:
        """Gather requests for the next :meth:`reset`; False if none came in ``timeout`` seconds."""
        while len(self._next) < self.batch_size[0]:
            taken = self.bridge.take(self.batch_size[0] - len(self._next),
                                     timeout=self.linger if self._next else timeout)
            if not taken:
                break
            for call in taken:
                if len(call.prompt) > self.max_prompt_tokens:
                    self.bridge.fail(call, f"the prompt has {len(call.prompt)} tokens, at most "
                                     f"{self.max_prompt_tokens} are taken")
                else:
                    self._next.append(call)
        return bool(self._next)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        calls, self._calls = self._calls, []
        response_BR = tensordict[data.RESPONSE_TOKENS].cpu()
        sizes, truncated = self._lengths(tensordict, response_BR)
        log_probs_BT = tensordict.get(data.LOG_PROBS, None)
        versions_BT = tensordict.get(data.POLICY_VERSIONS, None)
        prompt_sizes = tensordict[data.PROMPT_MASK].sum(-1).tolist()
        for i, call in enumerate(calls):
            size, start = sizes[i], prompt_sizes[i]
            self.bridge.reply(
                call, response_BR[i, :size].tolist(),
                None if log_probs_BT is None else log_probs_BT[i, start : start + size].tolist(),
                versions=[] if versions_BT is None else _spans(
                    versions_BT[i, start : start + size].tolist()),
                truncated=truncated[i])
        out = tensordict.select(data.PROMPT_TOKENS, data.PROMPT_MASK, data.GROUP_ID, ACTIVE,
                                "request")
        out["reward"] = torch.zeros(*self.batch_size, 1)
        out["truncated"] = torch.tensor(truncated)[:, None]
        out["terminated"] = ~out["truncated"]
        out["done"] = torch.ones_like(out["truncated"])
        return self._unrewarded(out)

    def _lengths(
        self, tensordict: TensorDictBase, response_BR: torch.Tensor
    ) -> tuple[list[int], list[bool]]:
        """Tokens of each reply, and whether a limit cut it."""
        is_end_BR = torch.isin(response_BR, torch.tensor(self.bridge.eos_token_ids))
        mask = tensordict.get(data.ASSISTANT_MASK, None)
        if mask is not None:
            sizes_B = mask.sum(-1).cpu()
        else:  # an action of tokens alone ends with its first end token
            sizes_B = (is_end_BR.int().cumsum(-1) - is_end_BR.int() == 0).sum(-1)
        reason = tensordict.get(data.FINISH_REASON, None)
        if reason is not None:
            cut_B = reason.cpu() == data.FINISH_LENGTH
        else:
            cut_B = ~is_end_BR.gather(1, (sizes_B - 1).clamp(min=0)[:, None])[:, 0]
        return sizes_B.tolist(), cut_B.tolist()

    def _unrewarded(self, out: TensorDictBase) -> TensorDictBase:
        out["reward_error"] = torch.ones(*self.batch_size, 1, dtype=torch.bool)
        out["success"] = ~out["reward_error"]
        return out

    def _set_seed(self, seed: int | None) -> None:
        """Nothing is random here: environments outside this process draw their own numbers."""

    def close(self, **kwargs) -> None:
        """Give unanswered requests back to the bridge."""
        self.bridge.put_back(self._calls + self._next)
        self._calls, self._next = [], []
        super().close(**kwargs)


def _spans(versions: list[int]) -> list[tuple[int, int]]:
    """``[(version, tokens), ...]`` of the versions of some tokens in order."""
    return [(version, len(list(same))) for version, same in itertools.groupby(versions)]


class RequestedSampling(TensorDictModuleBase):
    """A policy that samples each row as its request asks: temperature and greatest length.

    Rows that agree in both are generated together; rows that are not active are left empty.

    Args:
        policy: of any backend; its own ``max_tokens`` is the width ``R`` of the response.
    """

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy = policy
        self.in_keys = [*policy.in_keys, ACTIVE, TEMPERATURE, MAX_TOKENS]
        self.out_keys = policy.out_keys
        self._variants: dict[tuple[float, int], Policy] = {}

    @torch.no_grad()
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        B, P = tensordict[data.PROMPT_TOKENS].shape
        R = self.policy.sampling.max_tokens
        out = self._empty(B, P, R)
        groups: dict[tuple[float, int], list[int]] = {}
        for i in tensordict[ACTIVE].flatten().nonzero().flatten().tolist():
            options = tensordict[TEMPERATURE][i].item(), int(tensordict[MAX_TOKENS][i])
            groups.setdefault((options[0], min(options[1], R)), []).append(i)
        for options, rows in groups.items():
            index = torch.tensor(rows)
            part = self._variant(*options)(tensordict[index].select(*self.policy.in_keys))
            for key in self.out_keys:
                if out[key].ndim == 1:
                    out[key][index] = part[key]
                else:
                    out[key][index, : part[key].shape[1]] = part[key]
        return tensordict.update(out)

    def _variant(self, temperature: float, max_tokens: int) -> Policy:
        # The batch has it as float32, with digits that the request's number did not have.
        key = (float(f"{temperature:.6g}"), max_tokens)
        if key not in self._variants:
            self._variants[key] = self.policy.with_sampling(temperature=key[0],
                                                            max_tokens=max_tokens)
        variant = self._variants[key]
        # One counter for all, so that no two calls draw the same random numbers.
        variant.calls, self.policy.calls = self.policy.calls, self.policy.calls + 1
        return variant

    def _empty(self, B: int, P: int, R: int) -> TensorDict:
        pad, of_row = self.policy.pad_token_id, torch.zeros(B, dtype=torch.int64)
        out = TensorDict(batch_size=[B])
        out[data.RESPONSE_TOKENS] = torch.full((B, R), pad)
        for key, fill in ((data.TOKENS, pad), (data.ATTENTION_MASK, False),
                          (data.ASSISTANT_MASK, False), (data.LOG_PROBS, 0.0),
                          (data.POLICY_VERSIONS, data.NO_VERSION)):
            out[key] = torch.full((B, P + R), fill)
        out[data.FINISH_REASON], out[data.POLICY_VERSION] = of_row, of_row.clone()
        return out
