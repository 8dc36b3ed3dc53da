"""Conversion between the dense batch and what TorchRL's own chat components write and read."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from tensordict import TensorDict, lazy_stack, set_list_to_stack
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs.llm import ChatEnv
from torchrl.modules.llm import TransformersWrapper
from torchrl.modules.llm.policies import LogProbs, Tokens
from torchrl.objectives.llm import GRPOLoss, MCAdvantage
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from grpo import data
from grpo.data.torchrl import from_torchrl, is_dense, to_torchrl

PAD, EOS = 0, 3
QUERIES = ["hi", "hello there, you", "x"]
MAX_NEW_TOKENS = 6
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}{% endgeneration %}"
    "{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module", autouse=True)
def list_to_stack():
    with set_list_to_stack(True):
        yield


@pytest.fixture(scope="module")
def tokenizer():
    special = ["<pad>", "<eos>", "<|im_start|>", "<|im_end|>"]
    alphabet = special + sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"], chat_template=CHATML)


@pytest.fixture(scope="module")
def model(tokenizer):
    torch.manual_seed(0)
    # Heads of 32, because vLLM has no CPU kernel for smaller ones; an initializer_range that makes
    # the log-probs of different tokens differ.
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
        pad_token_id=PAD, eos_token_id=EOS, bos_token_id=None, initializer_range=0.1)
    model = Qwen2ForCausalLM(config).eval()
    # Never samples padding, of which TorchRL would delete all traces; ends some responses early.
    model.lm_head = torch.nn.Linear(128, len(tokenizer))
    with torch.no_grad():
        model.lm_head.bias[PAD] = -100.0
        model.lm_head.bias[EOS] = 4.0
    return model


def wrapper(model, tokenizer, mode, *, pad_output=False, generate=True):
    options = {"max_new_tokens": MAX_NEW_TOKENS, "do_sample": True, "temperature": 1.0}
    return TransformersWrapper(
        model, tokenizer=tokenizer, input_mode=mode, generate=generate, pad_output=pad_output,
        generate_kwargs=options if generate else {})


def history_batch(model, tokenizer, *, pad_output=False, mode="history"):
    """Three prompts of different lengths through ``ChatEnv``; the env has stepped once."""
    torch.manual_seed(1)
    env = ChatEnv(batch_size=(3,), input_mode=mode, tokenizer=tokenizer)
    td = env.reset(TensorDict({"query": QUERIES}, batch_size=[3]))
    return env.step(wrapper(model, tokenizer, mode, pad_output=pad_output)(td))


def tokens_batch(model, tokenizer, *, repeats=2):
    """``[len(QUERIES), repeats]``: groups of one prompt each, prompts of different lengths.

    ``ChatEnv`` in tokens mode cannot reset with prompts of different lengths, so it is one
    environment a group.
    """
    torch.manual_seed(2)
    groups = []
    for query in QUERIES:
        env = ChatEnv(batch_size=(repeats,), input_mode="tokens", tokenizer=tokenizer,
                      template_kwargs={"tokenize": True})
        td = env.reset(TensorDict({"query": [query] * repeats}, batch_size=[repeats]))
        groups.append(wrapper(model, tokenizer, "tokens")(td.select("tokens")))
    return lazy_stack(groups)


def recomputed_log_probs(model, dense):
    """Log-prob of each token given those before it, at temperature 1, ``[B, T]``."""
    mask = dense[data.ATTENTION_MASK]
    with torch.no_grad():
        logits = model(input_ids=dense[data.TOKENS], attention_mask=mask.long()).logits
    scores = logits[:, :-1].log_softmax(-1).gather(-1, dense[data.TOKENS][:, 1:, None])[..., 0]
    return torch.nn.functional.pad(scores, (1, 0))


def assert_scores_match(model, dense):
    """The log-probs of the tokens under the mask are the model's."""
    difference = dense[data.LOG_PROBS] - recomputed_log_probs(model, dense)
    assert difference[dense[data.ASSISTANT_MASK]].abs().max() < 1e-4


def sampled(dense):
    """Mask of every sampled token, the first of each response included."""
    starts = dense[data.PROMPT_MASK].sum(1, keepdim=True)
    return dense[data.ATTENTION_MASK] & (torch.arange(dense[data.TOKENS].shape[1]) >= starts)


def check_against_rows(dense, rows, tokenizer_prompts):
    """Compare with the ids the model saw: prompts from the tokenizer, responses as generated."""
    for i, (prompt, response) in enumerate(zip(tokenizer_prompts, rows, strict=True)):
        length = len(prompt) + len(response)
        assert dense[data.TOKENS][i, :length].tolist() == prompt + response
        assert (dense[data.TOKENS][i, length:] == PAD).all()
        assert dense[data.ATTENTION_MASK][i].sum() == length
        assert dense[data.ATTENTION_MASK][i, :length].all()
        assert dense[data.PROMPT_TOKENS][i][dense[data.PROMPT_MASK][i]].tolist() == prompt
        assert dense[data.RESPONSE_TOKENS][i, : len(response)].tolist() == response


def prompt_ids(tokenizer):
    text = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    return [tokenizer(text.format(query))["input_ids"] for query in QUERIES]


def dense_batch(seed=0, prompts=(2, 5, 1, 3), responses=(6, 1, 4, 2), *, token_level=False):
    """Random dense batch with tight ``P`` and ``R``; all optional entries present."""
    generator = torch.Generator().manual_seed(seed)
    B, P, R = len(prompts), max(prompts), max(responses)
    prompt_mask = torch.arange(P) < torch.tensor(prompts)[:, None]
    response_mask = torch.arange(R) < torch.tensor(responses)[:, None]
    ids = torch.randint(4, 200, (B, P + R), generator=generator)
    prompt, response = ids[:, :P] * prompt_mask, ids[:, P:] * response_mask
    log_probs = -torch.rand(B, R, generator=generator)
    log_probs[0, 0] = 0.0  # a sampled token may have probability one
    batch = data.join_prompt_response(
        prompt, prompt_mask, response, response_mask, log_probs, pad_token_id=PAD)
    batch[data.PROMPT_TOKENS], batch[data.PROMPT_MASK] = prompt, prompt_mask
    batch[data.RESPONSE_TOKENS] = response
    batch[data.REWARD] = torch.rand(B, 1, generator=generator)
    batch[data.REWARD_ERROR] = torch.arange(B)[:, None] == 1
    batch[data.SUCCESS] = torch.arange(B)[:, None] == 2
    batch[data.TRUNCATED] = torch.arange(B)[:, None] == 0
    batch[data.FINISH_REASON] = batch[data.TRUNCATED][:, 0].long()
    batch[data.GROUP_ID] = torch.arange(B) // 2
    data.stamp_versions(batch, torch.randint(5, 9, (B, R), generator=generator))
    batch[data.REF_LOG_PROBS] = batch[data.LOG_PROBS] * 0.5
    batch[data.ADVANTAGE] = torch.randn(B, 1, generator=generator)
    batch[data.LISTWISE_WEIGHT] = torch.rand(B, 1, generator=generator)
    batch[data.ROW_MASK] = torch.arange(B)[:, None] != 2
    if token_level:
        batch[data.ADVANTAGE] = batch[data.ADVANTAGE] * batch[data.ASSISTANT_MASK]
    return batch


class TestFromTransformersWrapper:
    @pytest.mark.parametrize("pad_output", [False, True])
    @pytest.mark.parametrize("mode", ["history", "text"])
    def test_tokens_are_those_the_wrapper_generated(self, model, tokenizer, mode, pad_output):
        td = history_batch(model, tokenizer, pad_output=pad_output, mode=mode)
        responses = [r[r != PAD].tolist() for r in td.get(("tokens", "response"), as_list=True)]
        assert len(set(map(len, responses))) > 1, "the rows should stop at different lengths"
        dense = from_torchrl(td, pad_token_id=PAD)
        assert is_dense(dense) and not is_dense(td)
        check_against_rows(dense, responses, prompt_ids(tokenizer))

    def test_group_batch_in_tokens_mode_is_flattened_in_order(self, model, tokenizer):
        td = tokens_batch(model, tokenizer)
        assert td.batch_size == (3, 2)
        responses = [row["tokens", "response"].tolist() for group in td for row in group]
        prompts = [ids for ids in prompt_ids(tokenizer) for _ in range(2)]
        dense = from_torchrl(td, pad_token_id=PAD)
        check_against_rows(dense, responses, prompts)

    @pytest.mark.parametrize("make", [history_batch, tokens_batch])
    def test_log_probs_match_the_model_on_every_scored_token(self, model, tokenizer, make):
        dense = from_torchrl(make(model, tokenizer), pad_token_id=PAD)
        assert_scores_match(model, dense)
        assert (dense[data.LOG_PROBS][~dense[data.ASSISTANT_MASK]] == 0).all()

    def test_first_sampled_token_is_masked_because_its_log_prob_is_missing(self, model, tokenizer):
        td = history_batch(model, tokenizer)
        masked = from_torchrl(td, pad_token_id=PAD)
        kept = from_torchrl(td, pad_token_id=PAD, zero_first_log_prob="keep")
        assert torch.equal(kept[data.ASSISTANT_MASK], sampled(kept))
        lost = kept[data.ASSISTANT_MASK] & ~masked[data.ASSISTANT_MASK]
        assert lost.sum(1).tolist() == [1, 1, 1]
        assert (kept[data.LOG_PROBS][lost] == 0).all()
        assert (recomputed_log_probs(model, kept)[lost] < -1e-3).all()

    def test_turns_of_a_rollout_become_rows(self, model, tokenizer):
        torch.manual_seed(3)
        env = ChatEnv(batch_size=(2,), input_mode="history", tokenizer=tokenizer)
        td = env.reset(TensorDict({"query": QUERIES[:2]}, batch_size=[2]))
        policy = wrapper(model, tokenizer, "history")
        rollout = env.rollout(2, policy, tensordict=td, auto_reset=False)
        rollout["next", "reward"] = torch.arange(4.0).view(2, 2, 1)
        dense = from_torchrl(rollout, pad_token_id=PAD)
        assert dense[data.REWARD].tolist() == [[0.0], [1.0], [2.0], [3.0]]
        turns = [row for conversation in rollout.unbind(0) for row in conversation.unbind(0)]
        for i, turn in enumerate(turns):
            row = dense[data.TOKENS][i][dense[data.ATTENTION_MASK][i]]
            assert row.tolist() == turn["tokens", "full"].tolist()
        first, second = dense[data.PROMPT_MASK][:2].sum(1).tolist()
        assert second > first
        assert_scores_match(model, dense)

    def test_scoring_pass_without_prompt_and_response(self, model, tokenizer):
        """``generate=False`` on a history leaves full tokens, the template's mask, log-probs."""
        td = history_batch(model, tokenizer)
        scored = wrapper(model, tokenizer, "history", generate=False)(td.select("history"))
        dense = from_torchrl(scored, pad_token_id=PAD)
        mask = dense[data.ASSISTANT_MASK]
        assert mask.any()
        for i, want in enumerate(scored.get(("masks", "all_assistant_mask"), as_list=True)):
            assert mask[i, : len(want)].tolist() == want.bool().tolist()
        assert_scores_match(model, dense)

    def test_batch_read_back_from_a_replay_buffer(self, model, tokenizer):
        td = history_batch(model, tokenizer)
        buffer = ReplayBuffer(storage=LazyStackStorage(10), batch_size=3)
        buffer.extend(td.select("tokens", "masks", "log_probs"))
        dense = from_torchrl(buffer[:], pad_token_id=PAD)
        want = from_torchrl(td, pad_token_id=PAD)
        for key in (data.TOKENS, data.ASSISTANT_MASK, data.LOG_PROBS):
            assert torch.equal(dense[key], want[key])


class TestHandMadeRows:
    def rows(self, *extra):
        """Two padded rows as TorchRL writes them: left-padded prompt, right-padded response."""
        td = TensorDict(
            tokens=Tokens(
                prompt=torch.tensor([[0, 5], [6, 7]]),
                response=torch.tensor([[8, 9, 3], [8, 3, 0]]),
                full=torch.tensor([[0, 5, 8, 9, 3], [6, 7, 8, 3, 0]]),
                padded=True,
                batch_size=[2]),
            log_probs=LogProbs(
                response=torch.tensor([[-1.0, -2, -3], [-4, -5, 0]]), padded=True, batch_size=[2]),
            batch_size=[2])
        for key, value in extra:
            td[key] = value
        return td

    def test_padding_is_found_without_masks(self):
        dense = from_torchrl(self.rows(), pad_token_id=PAD)
        assert dense[data.TOKENS].tolist() == [[5, 8, 9, 3, 0], [6, 7, 8, 3, 0]]
        assert dense[data.LOG_PROBS].tolist() == [[0, -1, -2, -3, 0], [0, 0, -4, -5, 0]]
        assert dense[data.PROMPT_TOKENS].tolist() == [[5, 0], [6, 7]]
        assert dense[data.ASSISTANT_MASK].sum(1).tolist() == [3, 2]

    def test_padding_token_sampled_inside_a_response_stays(self):
        td = self.rows()
        td["tokens"].response[0, 1] = td["tokens"].full[0, 3] = PAD
        td["masks", "all_attention_mask"] = td["tokens"].full != PAD
        dense = from_torchrl(td, pad_token_id=PAD)
        assert dense[data.TOKENS][0].tolist() == [5, 8, PAD, 3, 0]
        assert dense[data.LOG_PROBS][0].tolist() == [0, -1, -2, -3, 0]

    def test_non_finite_log_probs_leave_the_assistant_mask(self):
        td = self.rows()
        td["log_probs"].response[0, 1] = float("nan")
        dense = from_torchrl(td, pad_token_id=PAD)
        assert dense[data.ASSISTANT_MASK][0].tolist() == [False, True, False, True, False]
        assert dense[data.LOG_PROBS][0].tolist() == [0, -1, 0, -3, 0]

    def test_prompt_scores_are_dropped(self):
        """vLLM fills the prompt part of ``log_probs.full`` with scores or NaN."""
        td = self.rows()
        prompt = torch.tensor([[0, -9.0], [float("nan")] * 2])
        full = torch.cat([prompt, td["log_probs"].response], 1)
        td["log_probs"] = LogProbs(full=full, padded=True, batch_size=[2])
        dense = from_torchrl(td, pad_token_id=PAD)
        assert dense[data.LOG_PROBS].tolist() == [[0, -1, -2, -3, 0], [0, 0, -4, -5, 0]]

    def test_sequence_advantages_lose_the_extra_dimension(self):
        td = self.rows(("advantage", torch.tensor([[[1.5]], [[-2.0]]])))
        assert from_torchrl(td, pad_token_id=PAD)[data.ADVANTAGE].tolist() == [[1.5], [-2.0]]

    def test_token_advantages_and_reference_follow_their_tokens(self):
        values = torch.arange(10.0).view(2, 5)
        td = self.rows(("advantage", values[..., None]), (data.REF_LOG_PROBS, -values))
        dense = from_torchrl(td, pad_token_id=PAD)
        assert dense[data.ADVANTAGE].tolist() == [[0, 2, 3, 4, 0], [0, 0, 7, 8, 0]]
        assert torch.equal(dense[data.REF_LOG_PROBS], -dense[data.ADVANTAGE])

    def test_rows_the_collector_padded_are_dropped(self):
        td = self.rows((("collector", "mask"), torch.tensor([False, True])))
        dense = from_torchrl(td, pad_token_id=PAD)
        assert dense[data.TOKENS].tolist() == [[6, 7, 8, 3]]

    def test_episode_truncation_is_not_taken_for_a_cut_completion(self):
        td = self.rows((("next", "truncated"), torch.ones(2, 1, dtype=torch.bool)))
        assert data.TRUNCATED not in from_torchrl(td, pad_token_id=PAD).keys(True)

    @pytest.mark.parametrize(("drop", "message"), [
        ("log_probs", "return_log_probs=True"),
        ("tokens", "vLLMWrapper's 'text' has no prompt tokens"),
        (("tokens", "prompt"), "sampled tokens cannot be told from the prompt")])
    def test_missing_keys_are_named_with_the_fix(self, drop, message):
        with pytest.raises(KeyError, match=message):
            from_torchrl(self.rows().exclude(drop), pad_token_id=PAD)

    def test_values_that_do_not_fit_are_refused(self):
        for key, value, message in (
                (("next", "reward"), torch.ones(2, 5), "reward.*expected one number"),
                (data.ATTENTION_MASK, torch.ones(2, 4).bool(), "4 values for 5 tokens"),
                ("advantage", torch.ones(2, 3, 1), "advantage has 3 values"),
                ("policy_version", ["a", "b"], "version_type='int'")):
            with pytest.raises(ValueError, match=message):
                from_torchrl(self.rows((key, value)), pad_token_id=PAD)
        with pytest.raises(ValueError, match="set batch_size"):
            from_torchrl(TensorDict(self.rows().to_dict()), pad_token_id=PAD)
        with pytest.raises(ValueError, match="'mask', 'keep'"):
            from_torchrl(self.rows(), pad_token_id=PAD, zero_first_log_prob="drop")

    def test_tokens_deleted_by_the_wrapper_are_an_error(self):
        row = TensorDict(
            tokens=Tokens(
                prompt=torch.tensor([5, 3]), response=torch.tensor([8]), full=torch.tensor([5, 8])),
            log_probs=LogProbs(response=torch.tensor([-1.0])))
        with pytest.raises(ValueError, match="pad_token that is not its eos_token"):
            from_torchrl(lazy_stack([row]), pad_token_id=3)


lengths = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=6)


class TestToTorchRL:
    @given(lengths=lengths, seed=st.integers(0, 2**20), token_level=st.booleans())
    @settings(max_examples=20, deadline=None)
    def test_round_trip_is_the_identity(self, lengths, seed, token_level):
        prompts, responses = zip(*lengths, strict=True)
        dense = dense_batch(seed, prompts, responses, token_level=token_level)
        back = from_torchrl(to_torchrl(dense), pad_token_id=PAD)
        assert set(back.keys(True, True)) == set(dense.keys(True, True))
        for key in dense.keys(True, True):
            assert back[key].dtype == dense[key].dtype
            assert torch.equal(back[key], dense[key]), key

    @pytest.mark.parametrize("rows", [to_torchrl, TensorDict.clone])
    def test_lazy_replay_buffer_gives_the_rows_back(self, rows):
        """Both ragged and dense rows: what a lazy storage returns is a lazy stack in any case."""
        dense = dense_batch()
        buffer = ReplayBuffer(storage=LazyStackStorage(10), batch_size=4)
        buffer.extend(rows(dense))
        assert not is_dense(buffer[:])
        back = from_torchrl(buffer[:], pad_token_id=PAD)
        for key in (data.TOKENS, data.PROMPT_MASK, data.ASSISTANT_MASK, data.LOG_PROBS):
            assert torch.equal(back[key], dense[key])

    def test_mc_advantage_groups_by_group_id(self):
        dense = dense_batch()
        buffer = ReplayBuffer(storage=LazyStackStorage(10), batch_size=4)
        buffer.append_transform(MCAdvantage(grpo_size=2, prompt_key="group_id"))
        buffer.extend(to_torchrl(dense.exclude(data.ADVANTAGE)))
        assert buffer[:]["advantage"].shape == (4, 1, 1)  # what TorchRL's GRPOLoss asks for
        back = from_torchrl(buffer[:], pad_token_id=PAD)
        rewards = dense[data.REWARD].view(2, 2)
        want = (rewards - rewards.mean(1, keepdim=True)) / rewards.std(1, keepdim=True)
        order = torch.argsort(back[data.GROUP_ID], stable=True)
        assert torch.allclose(back[data.ADVANTAGE][order], want.view(4, 1), atol=1e-4)

    @pytest.mark.parametrize("masking_strategy", ["sft", "rlhf"])
    @pytest.mark.parametrize("token_level", [False, True])
    def test_torchrl_grpo_loss_is_the_token_mean_on_policy(
        self, model, tokenizer, masking_strategy, token_level
    ):
        # Token-level advantages are right-padded by that loss and log-probs left-padded, so only
        # rows of equal length can be compared there.
        shapes = ((3, 3, 3), (4, 4, 4)) if token_level else ((2, 5, 1), (6, 1, 4))
        dense = dense_batch(0, *shapes, token_level=token_level)
        scored = dense[data.ASSISTANT_MASK]
        dense[data.LOG_PROBS] = recomputed_log_probs(model, dense) * scored
        actor = wrapper(model, tokenizer, "tokens", generate=False)
        loss = GRPOLoss(actor, masking_strategy=masking_strategy, entropy_bonus=False)
        out = loss(to_torchrl(dense))
        want = -dense[data.ADVANTAGE].expand_as(scored)[scored].mean()
        assert torch.allclose(out.loss_objective, want, atol=1e-4)
        out.loss_objective.backward()
        assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
        model.zero_grad()

    def test_wrong_input_is_refused(self):
        with pytest.raises(ValueError, match="needs no conversion"):
            to_torchrl(to_torchrl(dense_batch()))
        with pytest.raises(KeyError, match="log_probs"):
            to_torchrl(dense_batch().exclude(data.LOG_PROBS))


class TestIsDense:
    def test_layouts_are_told_apart(self):
        dense = dense_batch()
        padded = TestHandMadeRows().rows()
        assert is_dense(dense)
        assert is_dense(dense[:2])
        assert is_dense(dense.clone().select("tokens"))
        assert not is_dense(padded)
        assert not is_dense(padded.to_tensordict())
        assert not is_dense(to_torchrl(dense))
        assert not is_dense(lazy_stack(list(dense.unbind(0))))
        assert not is_dense(TensorDict({}, [2]))


@pytest.fixture(scope="module")
def engine(model, tokenizer, tmp_path_factory):
    """A vLLM engine in this process and the Transformers model with the same weights."""
    vllm = pytest.importorskip("vllm")
    path = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    # Without the output bias of `model`, which vLLM's Qwen2 does not have.
    reference = Qwen2ForCausalLM(model.config).eval()
    reference.save_pretrained(path)
    tokenizer.save_pretrained(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setenv("TORCHDYNAMO_DISABLE", "1")
        llm = vllm.LLM(str(path), dtype="float32", enforce_eager=True, max_model_len=256,
                       kv_cache_memory_bytes=64 << 20)
        yield llm, reference


def vllm_batch(llm, tokenizer, mode, *, pad_output=False):
    from torchrl.modules.llm import vLLMWrapper

    policy = vLLMWrapper(
        llm, tokenizer=tokenizer, input_mode=mode, pad_output=pad_output,
        generate_kwargs={"max_tokens": MAX_NEW_TOKENS, "temperature": 1.0})
    env = ChatEnv(batch_size=(3,), input_mode=mode, tokenizer=tokenizer)
    return policy(env.reset(TensorDict({"query": QUERIES}, batch_size=[3])))


@pytest.mark.vllm
@pytest.mark.slow
class TestFromVLLMWrapper:
    @pytest.mark.parametrize("pad_output", [False, True])
    def test_tokens_masks_and_log_probs(self, engine, tokenizer, pad_output):
        llm, model = engine
        td = vllm_batch(llm, tokenizer, "history", pad_output=pad_output)
        dense = from_torchrl(td, pad_token_id=PAD)
        responses = td.get(("tokens", "response"), as_list=True)
        masks = td.get(("masks", "all_assistant_mask"), as_list=True)
        rows = [r[: int(m.sum())].tolist() for r, m in zip(responses, masks, strict=True)]
        check_against_rows(dense, rows, prompt_ids(tokenizer))
        assert torch.equal(dense[data.ASSISTANT_MASK], sampled(dense))
        assert_scores_match(model, dense)

    def test_text_mode_has_no_prompt_tokens(self, engine, tokenizer):
        td = vllm_batch(engine[0], tokenizer, "text")
        with pytest.raises(KeyError, match="vLLMWrapper's 'text' has no prompt tokens"):
            from_torchrl(td, pad_token_id=PAD)
