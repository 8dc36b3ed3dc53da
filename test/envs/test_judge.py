"""The reward of a language model: asked over HTTP, read strictly. The server is a stand-in."""

from __future__ import annotations

import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from grpo import data
from grpo.envs.rewards import RewardScorer, get_reward
from grpo.envs.rewards.judge import JudgeError, score_in
from grpo.envs.rewards.registry import with_options
from grpo.envs.tasks import Problem

PROBLEM = Problem(prompt=({"role": "user", "content": "6*7={completion}?"},), answer="42", id="p0")


class StandIn(ThreadingHTTPServer):
    """Does by the completion's first word what servers do, and notes what it was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.asked: list[dict] = []
        self.tries: dict[str, int] = {}
        self.running, self.most, self.lock = 0, 0, threading.Lock()

    def handle_error(self, request, client_address) -> None:
        """Say nothing of callers that did not wait for their answer."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = body["messages"][0]["content"].partition("judged:\n")[2].partition("\n")[0]
        with self.server.lock:
            self.server.asked.append({"path": self.path, "key": self.headers["Authorization"],
                                      **body})
            number = self.server.tries[text] = self.server.tries.get(text, 0) + 1
            self.server.running += 1
            self.server.most = max(self.server.most, self.server.running)
        status, said, headers = self._reply(text, number)
        with self.server.lock:
            self.server.running -= 1
        if status == 0:
            self.close_connection = True
            return
        payload = said if status != 200 else json.dumps(
            {"choices": [{"message": {"role": "assistant", "content": said}}]})
        self.send_response(status)
        for name, value in {"Content-Length": len(payload.encode()), **headers}.items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(payload.encode())

    @staticmethod
    def _reply(text: str, number: int) -> tuple[int, str, dict]:
        word = text.partition(" ")[0]
        if word == "busy" and number < 3:
            return 429, "too many", {"Retry-After": 0}
        if word == "failing" and number < 2:
            return 503, "not yet", {}
        if word == "gone" and number < 2:
            return 0, "", {}
        if word == "refused":
            return 400, "no such model", {}
        if word == "down":
            return 500, "for ever", {"Retry-After": 0}
        if word == "slow":
            time.sleep(0.1)
        if word == "late":
            time.sleep(1.5)
        return 200, {"chatty": "Score: 7, I think", "above": "Score: 11", "none": "",
                     "half": "It is so so.\n\nScore: 5\n"}.get(word, "Good.\nScore: 10"), {}

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server():
    with StandIn() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def judged(server, texts, *, timeout=30.0, **options):
    fn = with_options(get_reward("judge"), {"url": server.url, "model": "m", **options})
    return RewardScorer([(fn, 1.0)], timeout=timeout, processes=2)(texts, [PROBLEM] * len(texts))


def test_the_score_is_brought_to_the_unit_interval(server, monkeypatch):
    monkeypatch.setenv("MY_JUDGES_KEY", "secret")
    batch = judged(server, ["42", "half {answer}"], key_variable="MY_JUDGES_KEY", max_tokens=9)
    assert batch.reward.tolist() == [1.0, 0.5] and batch.success.tolist() == [True, False]
    asked, = (one for one in server.asked if "half" in one["messages"][0]["content"])
    text = asked["messages"][0]["content"]
    assert asked["path"] == "/v1/chat/completions" and asked["key"] == "Bearer secret"
    assert (asked["model"], asked["max_tokens"], asked["temperature"]) == ("m", 9, 0.0)
    # What is put in is not looked through for places again.
    assert "user: 6*7={completion}?" in text and "half {answer}" in text and "42" in text


@pytest.mark.parametrize("word", ["busy", "failing", "gone"])
def test_what_may_pass_is_asked_again(server, word):
    assert judged(server, [word]).reward.tolist() == [1.0]
    assert server.tries == {word: 3 if word == "busy" else 2}


@pytest.mark.parametrize(("word", "tries", "said"), [
    ("refused", 1, "in 1 tries, at last: status 400: no such model"),
    ("down", 3, "in 3 tries, at last: status 500: for ever"),
    ("chatty", 1, "last line is 'Score: 7, I think', not 'Score: N'"),
    ("above", 1, "'Score: 11'.*from 0 to 10"), ("none", 1, "last line is ''")])
def test_no_score_is_no_reward(server, word, tries, said):
    batch = judged(server, [word, "42"], retries=2)
    assert batch.fault.tolist() == [data.FAULT_FAILED, data.FAULT_NONE]
    assert server.tries[word] == tries
    with pytest.raises(JudgeError, match=said):
        raise JudgeError(batch.messages[0])


@pytest.mark.slow
def test_a_late_answer_is_asked_again_and_all_tries_share_a_deadline(server):
    batch = judged(server, ["late"], timeout=30, retries=1, concurrency=2)
    assert batch.reward.tolist() == [1.0]
    batch = judged(server, ["late again"], retries=1)
    fn_late = judged(server, ["late at last"], timeout=0.7)
    assert not batch.error.any() and fn_late.fault.tolist() == [data.FAULT_LATE]


def test_no_more_questions_at_a_time_than_allowed(server):
    texts = [f"slow {i}" for i in range(12)]
    assert judged(server, texts, concurrency=3).reward.tolist() == [1.0] * 12
    assert server.most == 3


def test_waiting_for_a_place_is_not_being_late(server):
    texts = [f"slow {i}" for i in range(8)]  # one after the other, 0.8 s and more
    assert judged(server, texts, concurrency=1, timeout=0.7).reward.tolist() == [1.0] * 8


def test_what_draws_random_numbers_when_it_is_imported_is_there_before_the_first_call(monkeypatch):
    monkeypatch.delitem(sys.modules, "httpx", raising=False)
    with_options(get_reward("judge"), {"url": "http://127.0.0.1:8000/v1", "model": "m"})
    assert "httpx" in sys.modules


@pytest.mark.parametrize(("options", "said"), [
    ({"url": "judge.example"}, "must be an address"), ({"scale": [3, 1]}, "two numbers"),
    ({"key_variable": "NO_SUCH_KEY"}, "no such variable"), ({"prompt": "Judge."}, "{completion}"),
    ({"tokens": 3}, "no option 'tokens'"), ({"retries": -1}, "retries=-1.*at least 0"),
    ({"concurrency": 0}, "concurrency=0.*at least 1"), ({"timeout": -1}, "timeout=-1.*above 0"),
    ({"timeout": 0}, "timeout=0"), ({"max_tokens": 0}, "max_tokens=0.*at least 1"),
    ({"temperature": -0.5}, "temperature=-0.5"), ({"success": float("nan")}, "success=nan"),
    ({"scale": ["0", "10"]}, "scale=.*valid number"), ({"scale": 5}, "scale=5"),
    ({"scale": [0, float("inf")]}, "two numbers"), ({"url": 5}, "url=5 should be a valid string"),
    ({"model": None}, "model=None")])
def test_what_cannot_work_is_refused(options, said):
    with pytest.raises(ValueError, match=said):
        with_options(get_reward("judge"), {"url": "http://127.0.0.1:9", "model": "m"} | options)


def test_an_address_and_a_model_are_needed():
    with pytest.raises(ValueError, match="'judge' needs model; set them in env.reward_options"):
        with_options(get_reward("judge"), {"url": "http://127.0.0.1:9"})


def test_the_prompt_may_be_a_file(server, tmp_path):
    (tmp_path / "prompt.txt").write_text("Say something of what is judged:\n{completion}\n")
    batch = judged(server, ["half"], prompt=str(tmp_path / "prompt.txt"))
    assert batch.reward.tolist() == [0.5]
    assert server.asked[0]["messages"][0]["content"].startswith("Say something")


@pytest.mark.parametrize("answer", ["", "Score:", "score: 3", "Score: 3\nDone.", "Score: 3 ",
                                    "Score: 1e1", "**Score: 3**", "Score: nan"])
def test_scores_are_read_strictly(answer):
    if answer == "Score: 3 ":  # space at the end is none of the answer
        assert score_in(answer, 0, 10) == 3
        return
    with pytest.raises(JudgeError, match="last line"):
        score_in(answer, 0, 10)
