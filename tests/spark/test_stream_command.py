"""The commands print progress and missing messages, and signals stop a stream; no Spark runs."""

from __future__ import annotations

import os
import signal
import time
from typing import Any, cast

import pytest

from lanes.cli.misuse import Misuse
from lanes_spark import JournalFacts, JournalSelection, OldestMessage, Progress, Report
from lanes_spark.cli.commands import Signals, only_of
from lanes_spark.cli.output import described, lacking
from lanes_spark.plan import Plan


class Running:
    """A fake stream, which ends ``polls`` calls of `join` after its stop; None: it never ends."""

    def __init__(self, polls: int | None) -> None:
        self.polls = polls
        self.calls: list[str] = []
        self.looks = 0

    def join(self, timeout: float | None = None) -> bool:
        self.looks += 1
        assert self.looks < 1_000, "the stream does not stop"
        if "cancel" in self.calls:
            return True
        if "stop" in self.calls and self.polls is not None:
            self.polls -= 1
            return self.polls < 0
        if self.looks != 1:
            # Signals within a second of the first count as the first, so a second request takes a second.
            time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGTERM)
        return False

    def stop(self) -> None:
        self.calls.append("stop")

    def cancel(self) -> None:
        self.calls.append("cancel")


@pytest.mark.parametrize(("polls", "at_once", "calls"), [(3, False, ["stop"]), (None, True, ["stop", "cancel"])])
def test_a_first_signal_stops_in_order_and_a_second_one_at_once(
    polls: int | None, at_once: bool, calls: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with Signals() as signals:
        running = Running(polls)
        assert signals.wait(cast(Any, running)) is at_once
    assert running.calls == calls
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    said = capfd.readouterr().err
    assert "lanes: SIGTERM: stopping after the current batch; a second signal stops at once\n" in said
    assert ("lanes: SIGTERM: stopping at once\n" in said) is at_once


def test_a_journal_and_its_selection_must_be_given_together() -> None:
    assert only_of("", [], "") is None
    found = only_of("dead_lettered", ["a", "b"], "")
    assert found == JournalSelection(path=["a", "b"], of="dead_lettered")
    assert only_of("unfinished", ["a"], "orders") == JournalSelection(path=["a"], of="unfinished", topic="orders")
    for of, paths, topic in (("unfinished", [], ""), ("", ["a"], ""), ("", [], "orders")):
        with pytest.raises(Misuse, match="needs both --only STATE and --from-journal DIR"):
            only_of(of, paths, topic)


def test_possibly_missing_messages_are_printed() -> None:
    facts = JournalFacts(of="unfinished", topic="orders", runs=2, positions=9, doubts=("one run has no end",))
    plan = Plan(kind="aligned")
    counts: dict[str, Any] = {"delivered": 0, "finished": 0, "dead_lettered": 0, "skipped": 0, "batches": 0}
    assert lacking(Report(**counts, seconds=1.0, plan=plan)) == []
    report = Report(**counts, seconds=1.0, plan=plan, journal=facts, missing=1_234)
    assert lacking(report) == [
        "the journal may be incomplete: one run has no end",
        "the source lacks 1,234 of the positions that the journal selects",
    ]


def test_the_progress_is_one_line_that_cannot_control_the_terminal() -> None:
    oldest = OldestMessage(partition="or\x1b[2Jders/1", position=77, attempt=2, age=3.14, key="00ab")
    reached: dict[str, Any] = {"batches": 2, "finished": 900, "positions": 9_000, "left": 8_100, "seconds": 2.0}
    text = described(Progress(**reached, delivered=1_000, dead_lettered=3, running=4, oldest=oldest))
    assert text.startswith("batch 3 in 4 task(s): 1,000 rows, 500 rows/s, lag 8,100, 3 dead-lettered; oldest or")
    assert text.endswith(" 77, key 00ab, attempt 2, 3.1 s")
    assert "\x1b" not in text
    between = described(Progress(**reached, delivered=1_000, dead_lettered=0))
    assert between == "2 batches: 1,000 rows, 500 rows/s, lag 8,100"
