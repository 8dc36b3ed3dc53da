"""Environments that register and ask nobody: said once, with the reason, and only when it is so."""

from __future__ import annotations

import pytest

from grpo.atropos.client import AtroposUnreachableError
from grpo.atropos.silence import SILENT_SECONDS, SilenceCheck


class Site:
    """A hub, an engine and a clock."""

    def __init__(self, **options):
        self.now, self.count, self.said = 0.0, 3, []
        self.names: list[str] | None = ["gsm8k_0"]
        self.check = SilenceCheck(self, lambda: self.count, url="http://127.0.0.1:9001",
                                  say=self.said.append, clock=lambda: self.now, **options)

    def status(self):
        if self.names is None:
            raise AtroposUnreachableError("nobody there")
        return {"current_step": 0, "hub": {"environments": [
            {"name": name, "connected": name != "gone"} for name in self.names]}}

    def wait(self, seconds):
        for _ in range(int(seconds)):
            self.now += 1.0
            self.check()
        return self.said


def test_it_is_said_once_after_the_stated_time_with_reason_and_fix():
    site = Site()
    assert site.wait(SILENT_SECONDS - 1) == []
    (said,) = site.wait(30)
    assert site.wait(600) == [said] and site.check.message == said
    assert "gsm8k_0 registered 60 s ago" in said
    assert "no request has come to the engine at http://127.0.0.1:9001" in said
    assert "--forward-ports 9004,9005,9006,9007" in said and "config_init" in said


def test_one_request_is_enough_and_takes_back_what_was_said():
    site = Site()
    site.wait(30)
    site.count += 1
    assert site.wait(300) == []
    site = Site()
    assert site.wait(90)
    site.count += 1
    site.wait(10)
    assert site.check.message is None and len(site.said) == 1


def test_time_counts_from_the_registration():
    site = Site()
    site.names = ["gone"]
    assert site.wait(300) == []
    site.names = ["mine_0"]
    assert site.wait(SILENT_SECONDS - 5) == []
    assert "mine_0" in site.wait(15)[0]


def test_of_an_api_that_does_not_tell_who_has_registered_it_says_what_is_known():
    site = Site()
    site.status = lambda: {"current_step": 0, "queue_size": 0}  # as run-api
    assert site.wait(SILENT_SECONDS - 1) == []
    (said,) = site.wait(30)
    assert "no request has come to the engine at http://127.0.0.1:9001. If no environment" in said
    assert "--forward-ports 9004,9005,9006,9007" in said
    site.count += 1
    site.wait(10)
    assert site.check.message is None


@pytest.mark.parametrize("unknown", ["no API", "no count"])
def test_nothing_is_said_where_it_cannot_be_known(unknown):
    site = Site()
    if unknown == "no API":
        site.names = None
    else:
        site.count = None
    assert site.wait(300) == []


def test_with_forwarded_ports_it_says_that_they_are_not_asked_either():
    (said,) = Site(forwarded=(9004, 9005)).wait(90)
    assert "nor to the ports 9004,9005 that lead to it" in said and "--forward-ports" not in said
