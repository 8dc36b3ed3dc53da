"""Rendering of problems, and the stream that can be stopped and continued."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo.envs.prompts import (
    THINKING_PROMPT,
    Prompt,
    PromptStream,
    framed,
    give_template,
    render,
    render_all,
    template_text,
)
from grpo.envs.tasks.base import Problem

CHAT = ({"role": "user", "content": "hi"},)


def problem(name: str, prompt=None) -> Problem:
    return Problem(prompt or name, name, name)


def stream(count: int, **options) -> PromptStream:
    return PromptStream([Prompt(problem(str(i)), [i]) for i in range(count)], **options)


def ids(prompts: list[Prompt]) -> list[str]:
    return [prompt.problem.id for prompt in prompts]


@given(count=st.integers(1, 12), seed=st.integers(0, 1000), before=st.integers(0, 40),
       after=st.integers(1, 40), shuffle=st.booleans())
def test_a_restored_stream_continues_the_same_sequence(count, seed, before, after, shuffle):
    first = stream(count, seed=seed, shuffle=shuffle)
    first.take(before)
    state = first.state_dict()
    expected = ids(first.take(after))
    second = stream(count, seed=seed, shuffle=shuffle)
    second.load_state_dict(state)
    assert ids(second.take(after)) == expected
    assert second.state_dict() == first.state_dict()


@given(count=st.integers(1, 12), seed=st.integers(0, 1000), sizes=st.lists(st.integers(1, 7),
                                                                           min_size=1, max_size=20))
def test_each_epoch_visits_every_prompt_once_however_it_is_cut(count, seed, sizes):
    drawn = stream(count, seed=seed)
    order = [name for size in sizes for name in ids(drawn.take(size))]
    for start in range(0, len(order) - count + 1, count):
        assert sorted(order[start : start + count], key=int) == [str(i) for i in range(count)]


def test_epochs_and_seeds_have_different_orders():
    one, two = stream(20, seed=0), stream(20, seed=1)
    first, second = ids(one.take(20)), ids(one.take(20))
    assert first != second
    assert first != ids(two.take(20))
    assert first != sorted(first, key=int)


def test_without_shuffling_the_given_order_repeats():
    assert ids(stream(3, shuffle=False).take(7)) == list("0120120")


def test_a_stream_restored_over_fewer_prompts_starts_the_next_epoch():
    drawn = stream(3, shuffle=False)
    drawn.load_state_dict({"epoch": 0, "position": 5})
    assert ids(drawn.take(3)) == list("012")
    assert drawn.state_dict() == {"epoch": 1, "position": 3}


def test_a_stream_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one prompt"):
        PromptStream([])


def test_text_is_tokenised_as_it_is_and_chats_by_their_template(tokenizer):
    assert tokenizer.decode(render(problem("p", "3+4="), tokenizer)) == "3+4="
    assert tokenizer.decode(render(problem("p", CHAT), tokenizer)) == "user: hi\nassistant: "


def test_text_begins_as_the_tokenizer_has_it_and_is_not_ended(adding_tokenizer):
    added = adding_tokenizer("3+4=")["input_ids"]
    assert added[0] == adding_tokenizer.bos_token_id  # or this tests nothing
    tokens = render(problem("p", "3+4="), adding_tokenizer)
    assert tokens == added[:5]
    assert adding_tokenizer.decode(tokens) == "<bos>3+4="


def test_a_text_that_begins_with_the_special_token_does_not_get_it_twice(adding_tokenizer):
    assert adding_tokenizer.decode(render(problem("p", "<bos>3+4="), adding_tokenizer)) == (
        "<bos>3+4=")


def test_a_chat_has_the_special_tokens_of_its_template_alone(adding_tokenizer):
    tokens = render(problem("p", CHAT), adding_tokenizer)
    assert tokens.count(adding_tokenizer.bos_token_id) == 1
    assert adding_tokenizer.decode(tokens) == "<bos>user: hi\nassistant: "


def test_a_tokenizer_whose_beginning_cannot_be_told_is_refused():
    def shuffled(text, *, add_special_tokens=True):
        return {"input_ids": [3, 2] if add_special_tokens else [2, 3]}

    with pytest.raises(ValueError, match=r"makes .* of 'a'.*use chat messages, or give token"):
        render(problem("p", "3+4="), shuffled)


def test_a_chat_without_a_template_says_what_to_use():
    class Bare:
        chat_template = None

    with pytest.raises(ValueError, match="'p' is a chat .* no chat template; set env.chat"):
        render(problem("p", CHAT), Bare())


@pytest.mark.parametrize(("template", "said"), [
    ("{{ messages[0].content }}", 1),
    ("{{ messages[0].content }}{{ tools[-1] }}{{ tools|length }}", 0)])
def test_tools_that_the_template_does_not_show_are_spoken_of(tokenizer, caplog, template, said,
                                                             monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", template)
    tool = {"type": "function", "function": {"name": "find", "description": "", "parameters": {}}}
    problems = [Problem(CHAT, "", name, tools=(tool,)) for name in "ab"]
    render_all(problems, tokenizer, max_prompt_tokens=99, what="train")
    assert caplog.text.count("train: problems have tools, as 'a' has, but the chat template does "
                             "not show them; set env.chat_template") == said


def test_prompts_that_are_too_long_are_skipped_counted_and_logged(tokenizer, caplog):
    problems = [problem("a" * size) for size in (1, 3, 2, 5)]
    with caplog.at_level(logging.WARNING, logger="grpo"):
        assert len(render_all(problems, tokenizer, max_prompt_tokens=5, what="x")) == 4
        kept = render_all(problems, tokenizer, max_prompt_tokens=2, what="numbers train")
    assert ids(kept) == ["a", "aa"]
    (record,) = caplog.records  # of the second call alone
    for part in ("numbers train", "2 of 4", "max_prompt_tokens=2", "longest 5", "'aaa'", "skipped"):
        assert part in record.message


def test_when_all_prompts_are_too_long_the_error_says_what_to_raise(tokenizer):
    with pytest.raises(ValueError, match=r"1 of 1 .*nothing is left, raise env\.max_prompt_tokens"):
        render_all([problem("aaa")], tokenizer, max_prompt_tokens=2, what="x")


SYSTEM = {"role": "system", "content": "Own."}
CONTENT = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}"


@pytest.mark.parametrize("prompt, system, thinking, expected", [
    ("1+1=", None, None, None), ("1+1=", "Add.", None, ["Add.", "1+1="]),
    ("1+1=", None, "Think.", ["Think.", "1+1="]), ("1+1=", "", None, ["1+1="]),
    (CHAT, "Add.", True, [f"Add.\n\n{THINKING_PROMPT}", "hi"]),
    ((SYSTEM, *CHAT), None, "Think.", ["Own.\n\nThink.", "hi"]),
    ((SYSTEM, *CHAT), "Add.", None, ["Add.", "hi"]), ((SYSTEM, *CHAT), "", None, ["hi"]),
    ((SYSTEM, *CHAT), "", "Think.", ["Think.", "hi"])])
def test_every_prompt_begins_as_it_is_told_to(prompt, system, thinking, expected):
    before = problem("p", prompt)
    after = framed(before, system_prompt=system, thinking_prompt=thinking)
    if expected is None:
        assert after is before
    else:
        assert [message["content"] for message in after.prompt] == expected
        assert after.prompt[-1]["role"] == "user" and (after.answer, after.id) == ("p", "p")


class TestChatTemplates:
    @pytest.fixture
    def base(self, byte_tokens):
        byte_tokens.chat_template = None
        return byte_tokens

    @pytest.fixture
    def byte_tokens(self):
        from grpo.envs.embedded import byte_tokenizer
        return byte_tokenizer()

    def text(self, tokenizer, *messages) -> str:
        return tokenizer.decode(render(problem("p", messages), tokenizer))

    def test_a_model_without_one_gets_a_plain_one_where_there_are_chats(self, base):
        assert give_template(base, None, [problem("p", CHAT)])
        said = {"role": "assistant", "content": "ho"}
        assert self.text(base, SYSTEM, *CHAT, said, *CHAT) == (
            "System: Own.\n\nUser: hi\n\nAssistant: ho<eos>\n\nUser: hi\n\nAssistant:")
        assert not give_template(base, None, [problem("p", CHAT)])  # it is the tokenizer's now

    def test_text_needs_none(self, base):
        assert not give_template(base, None, [problem("p")]) and base.chat_template is None
        with pytest.raises(ValueError, match="env.chat_template=.* not read because all prompts"):
            give_template(base, CONTENT, [problem("p")])

    def test_what_a_tokenizer_puts_before_a_text_begins_the_plain_one(self, base):
        from tokenizers.processors import TemplateProcessing
        base.add_special_tokens({"bos_token": "<s>"})
        base.backend_tokenizer.post_processor = TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", base.bos_token_id)])
        give_template(base, None, [problem("p", CHAT)])
        assert self.text(base, *CHAT) == "<s>User: hi\n\nAssistant:"

    def test_a_chosen_one_wins_and_is_saved_with_the_tokenizer(self, byte_tokens, tmp_path):
        from transformers import AutoTokenizer
        (tmp_path / "own.jinja").write_text(CONTENT)
        assert not give_template(byte_tokens, str(tmp_path / "own.jinja"), [problem("p", CHAT)])
        assert self.text(byte_tokens, SYSTEM, *CHAT) == "[Own.][hi]"
        byte_tokens.save_pretrained(tmp_path / "saved")
        assert self.text(AutoTokenizer.from_pretrained(tmp_path / "saved"), *CHAT) == "[hi]"

    @pytest.mark.parametrize("given, message", [
        ("nowhere.jinja", "there is no such file, and it is no template"),
        ("{% for m in messages %}", "not a template: Unexpected end of template")])
    def test_what_is_none_is_refused(self, given, message):
        with pytest.raises(ValueError, match=message):
            template_text(given)
