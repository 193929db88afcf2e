"""Reading any bytes as a history raises no error but HistoryError, and every readable history gets a verdict."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from lanes.config import Settings
from lanes.core.types import Message, Partition
from lanes.history.recorder import Recorder
from lanes.history.rules import Rules
from lanes.source import SourceTraits
from memsource import CHECKERS, HistoryError, check, counts, read_bytes, render
from tests.core.builders import new_message, new_partition


@functools.cache
def real_lines() -> tuple[bytes, ...]:
    """The lines of a real segment with most kinds of rows, from which the attack starts."""
    with tempfile.TemporaryDirectory() as folder:
        history = Recorder(folder, member="m")
        rules = Rules.of(Settings(), SourceTraits(name="S", extend_interval=1.0), "skip")
        history.open(source="S", concurrency=2, max_in_flight=9, max_in_flight_bytes=99, now=1.0, rules=rules)
        partition = new_partition()
        partition.assignment = 1
        messages = [new_message(partition, position, key) for position, key in enumerate((b"a", b"a", None, b"b"))]
        history.assigned(partition, 1.0)
        history.delivered(messages, 1.1)
        _lives(history, messages)
        # Another assignment, of a source that commits.
        committing = Partition(partition.id, partition.reader, floor=0)
        committing.assignment = 2
        history.assigned(committing, 2.5)
        history.delivered([new_message(committing, 0, b"a"), new_message(committing, 1, b"b")], 2.6)
        history.commit_sent(committing, 1, 1, 2.7)
        history.commit_ok(committing, 1, 2.8)
        history.commit_failed(committing, 1, 2.9)
        history.ahead_reached(committing, messages[1], 2.9)
        history.ahead_left(committing, 2.9)
        history.extended(messages, 2.9)
        history.unblocked(b"a", 1, 2.9)
        history.hastened(partition, 2.9, 0.5)
        for row in (history.revoking, history.drained, history.revoked, history.lost):
            row(partition, 3.0)
        history.close("drained", 4.0)
        assert history.path is not None
        return tuple(Path(history.path).read_bytes().splitlines(keepends=True))


def _lives(history: Recorder, messages: list[Message]) -> None:
    first, second, third, fourth = messages
    history.produced(first.partition.id, 0, b"a", 1.0)
    history.started(first, 1.2)
    history.ended(first, "ok", 1.3)
    history.acks([first], 1.4)
    history.redelivered(first, "settled", 1.5)
    history.started(second, 1.6)
    history.ended(second, "error", 1.7, ValueError("no"))
    history.retry(second, 0.1, 1.7)
    history.dlq_sent(second, 1.8)
    history.dlq_confirmed(second, 1.9)
    history.archived(second, 1.9)
    history.blocked(second, 1.9)
    history.paused(3, 30, 2.0)
    history.resumed(1, 10, 2.1)
    history.started(third, 2.2)
    history.zombie(third, 2.3)
    history.abandoned([fourth], 2.4)


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 5),
    st.sampled_from([2**63, 2**64, -(2**70), 1e15, -1.0, float("nan"), float("inf"), 0.5]),
    st.sampled_from(["", "S/0", "S/1", "m", "ok", "begin", "gap", "started", "0" * 16, "x" * 300, "\u2028", "\ud800"]),
    st.text(max_size=5),
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(), inner, max_size=2)
)


@st.composite
def lines(draw: st.DrawFn) -> bytes:
    """Return a line: a real line, a changed real line, a part of a real line, or any bytes."""
    line = draw(st.sampled_from(real_lines()))
    how = draw(st.sampled_from(["real", "real", "changed", "changed", "renumbered", "cut", "flipped", "bytes"]))
    if how == "changed":
        fields = json.loads(line)
        for name in draw(st.lists(st.sampled_from(sorted(fields)), max_size=3)):
            fields[name] = draw(VALUES)
        for name in draw(st.lists(st.sampled_from(sorted(fields)), max_size=1)):
            del fields[name]
        return json.dumps(fields).encode() + b"\n"
    if how == "renumbered":
        fields = json.loads(line)
        fields["n"], fields["mono"] = draw(st.integers(0, 40)), draw(st.floats(0, 10))
        return json.dumps(fields).encode() + b"\n"
    if how == "cut":
        return line[draw(st.integers(0, len(line))) : draw(st.integers(0, len(line)))]
    if how == "flipped":
        place = draw(st.integers(0, len(line) - 1))
        return line[:place] + bytes([draw(st.integers(0, 255))]) + line[place + 1 :]
    if how == "bytes":
        return draw(st.binary(max_size=40))
    return line


def check_one(data: bytes) -> None:
    """Read the bytes as a history, judge the history, and render the verdict."""
    try:
        segments = read_bytes(data)
    except HistoryError:
        return
    assert segments
    assert all(segment.rows for segment in segments)
    verdicts = check(segments)
    assert len(verdicts) == len(CHECKERS)
    assert render(verdicts, counts(segments))


def properties(effort: settings, tick: Callable[[], None]) -> list[Callable[[], None]]:
    """Return tests of reading files."""

    @effort
    @given(
        data=st.one_of(
            st.lists(lines(), max_size=40).map(b"".join),
            # The whole segment with a foreign line in it.
            st.builds(
                lambda place, line: b"".join((*real_lines()[:place], line, *real_lines()[place:])),
                st.integers(0, len(real_lines())),
                lines(),
            ),
            st.binary(max_size=200),
        )
    )
    def history(data: bytes) -> None:
        tick()
        check_one(data)

    return [history]
