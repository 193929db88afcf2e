"""The view of a run: exact texts of small histories, and bounds for large ones."""

from __future__ import annotations

import re
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lanes import Message, Retry, Settings
from memsource.history.reader import Segment
from memsource.personality import PERSONALITIES, PersonalityName
from memsource.sim.plans.faults import faults
from memsource.sim.plans.plan import Fault, Plan, Schedule
from memsource.sim.runs.grid import GridRow, draw
from memsource.sim.runs.run import Conditions, Run, run_plan
from memsource.sim.runs.view import LINES, render, render_history
from memsource.sim.world.injection import Moment
from memsource.sim.world.worker import App
from memsource.sim.world.world import World
from tests.effort import runs
from tests.memsource.checkers import rows as written
from tests.memsource.checkers.rows import (
    Fields,
    Rows,
    ack,
    ended,
    handled,
    message,
    owned,
    parsed,
    redelivered,
    started,
)


def segment(*rows: Fields | Rows, **more: Any) -> Rows:
    """A segment that begins at 0."""
    return written.segment(*rows, start=0.0, **more)


def at(time: float, *rows: Fields) -> Rows:
    """The rows with this time."""
    return [{**row, "mono": time} for row in rows]


def shown(*segments: Rows, moments: tuple[Moment, ...] = (), about: tuple[str, ...] = (), width: int = 100) -> str:
    return "\n" + render_history(parsed(*segments), moments, about=about, width=width) + "\n"


def commit(event: str, floor: int) -> Fields:
    more = {"completed": 0} if event == "commit_sent" else {}
    return owned(event, floor=floor, **more)


def test_the_view_shows_a_crash_and_its_repeats() -> None:
    first = segment(
        at(1.0, owned("assigned", incarnation="x"), owned("assigned", partition="S/1", incarnation="x")),
        at(1.0, started(0), started(7, "z", partition="S/1")),
        at(1.01, ended(0)),
        at(1.02, commit("commit_sent", 1), started(1)),
        member="w-1",
        end=None,
    )
    second = segment(
        at(5.0, owned("assigned", incarnation="x", assignment=2)),
        at(5.0, started(0, assignment=2)),
        at(5.01, ended(0, assignment=2), started(1, assignment=2)),
        at(5.02, ended(1, assignment=2), {**commit("commit_sent", 2), "assignment": 2}),
        at(5.03, {**commit("commit_ok", 2), "assignment": 2}),
        at(5.04, owned("revoked", assignment=2)),
        member="w-2",
        pid=2,
    )
    crash = Moment(1.03, Fault(4, "crash", 0, 1.0), "w-1")
    assert (
        shown(first, second, moments=(crash,))
        == """
workers: A w-1 (crashed), B w-2
  1     1.000 s  A assigned S/0,1
  2     1.030 s  fault: crash of A, at boundary 4, 1 s
  3     5.000 s  B assigned S/0

seconds       1      1.01      1.03 5    5.01
events        1                2   ~3
S/0 commits            Ac1?        ~          Bc2
S/0 5cbcb0ce    A0===.      A1===+ ~  B0=.B1=.
S/1 1104908a      A7==============+~

A7== A runs position 7, . ok, + its worker was gone, c commit (c? unconfirmed, c! failed)
~ time cut out
"""
    )


def test_the_view_shows_retries_dead_letters_acks_and_late_messages() -> None:
    rows = segment(
        at(1.0, started(0)),
        at(1.1, ended(0, result="error"), message("retry", 0, delay=0.1)),
        at(1.2, started(0, attempt=2)),
        at(1.3, ended(0, result="error", attempt=2), message("dlq_sent", 0)),
        at(1.4, message("dlq_confirmed", 0)),
        at(1.5, ack(0), started(1)),
        at(1.6, redelivered(0, "settled"), owned("lost")),
        at(1.7, ended(1, result="cancelled"), message("abandoned", 1), message("abandoned", 2)),
        at(1.8, message("dlq_sent", 5, "y")),
    )
    assert (
        shown(rows)
        == """
workers: A m-1
  1     1.600 s  A lost S/0

seconds       1  1.1   1.3    1.6  1.7 1.8
events                          1
S/0 5cbcb0ce  A0=!r A0=!d kA1=^0===xz-
S/0 08112a9e                           d?5

A7== A runs position 7, ! error, x cancelled, r held for a retry, d dead letter (d? unconfirmed)
- given up, z zombie, k ack sent, ^ redelivered
"""
    )


def test_overlapping_handlers_of_a_lane_have_their_own_lines() -> None:
    first = segment(at(1.0, started(0)), at(1.2, ended(0)), member="w-1")
    second = segment(at(1.1, started(0)), at(1.3, ended(0)), member="w-2", pid=2)
    assert (
        shown(first, second)
        == """
workers: A w-1, B w-2

seconds       1  1.1  1.3
S/0 5cbcb0ce  A0====.
                 B0===.

A7== A runs position 7, . ok
"""
    )


def test_a_history_without_an_end_shows_no_crash_unless_the_plan_has_one() -> None:
    text = shown(segment(at(1.0, started(3)), member="w-9", end=None))
    assert "A w-9 (without an end)" in text
    assert "A3+" in text


def test_a_handler_without_an_end_reaches_the_edge() -> None:
    text = shown(segment(at(1.0, started(3)), at(1.1, started(4, "y")), at(1.2, ended(4, "y"))))
    assert "S/0 5cbcb0ce  A3=====\n" in text


def test_names_of_a_history_are_escaped_for_the_terminal() -> None:
    text = shown(
        segment(
            at(1.0, started(0, partition="\x1b[2J\n/0"), commit("commit_sent", 1)),
            at(1.0, owned("assigned", partition="\x1b[31m/1", incarnation="x"), started(1)),
        )
    )
    assert "\x1b" not in text
    assert r"\x1b[31m/1" in text
    assert r"\x1b[2J\n/0" in text


def test_an_unfinished_handover_has_a_line() -> None:
    text = shown(
        segment(
            at(1.0, owned("revoking"), owned("revoking", partition="S/1"), started(0)),
            at(1.1, ended(0), owned("revoked")),
            at(1.2, started(1, "y")),
        )
    )
    assert re.findall("A (?:re.*)", text) == ["A revoking S/1", "A revoked S/0"]


def many(lanes: int, messages: int) -> list[Segment]:
    rows = [at(1 + i / 100, *handled(i, f"key-{i % lanes}")) for i in range(lanes * messages)]
    return parsed(segment(*rows))


def test_the_lanes_named_by_findings_are_shown() -> None:
    segments = many(60, 3)
    key = segments[0].rows[-3].key
    assert key is not None
    text = render_history(segments, about=[f"PerKeyOrder: violated: S/0 position 1 key {key}, m-1 pid 1 row 9: it ran"])
    first = next(row.key for row in segments[0].rows if row.position == 1)
    assert first is not None
    assert f"S/0 {key[:8]}" in text
    assert f"S/0 {first[:8]}" in text
    assert "58 lanes left out" in text
    by_number = render_history(segments, about=["1 message(s) unfinished: partition 0 position 61"])
    assert f"S/0 {first[:8]}" in by_number
    assert "59 lanes left out" in by_number


def test_lanes_with_unusual_events_come_first() -> None:
    rows = [at(1 + i / 100, *handled(i, f"key-{i % 60}")) for i in range(180)]
    rows.append(at(4.0, started(1000, "odd"), ended(1000, "odd", result="error")))
    assert "A1000!" in shown(segment(*rows))


@pytest.mark.long
@settings(max_examples=runs(30))
@given(
    lanes=st.integers(1, 80),
    messages=st.integers(1, 12),
    width=st.integers(40, 200),
    named=st.lists(st.integers(0, 100), max_size=3),
)
def test_the_view_fits_its_width(lanes: int, messages: int, width: int, named: list[int]) -> None:
    text = render_history(many(lanes, messages), about=[f"S/0 position {each}" for each in named], width=width)
    assert len(text.splitlines()) <= LINES
    assert max(map(len, text.splitlines())) <= width
    assert "A0" in text or "left out" in text


@given(
    times=st.lists(st.floats(0, 100), min_size=1, max_size=40).map(sorted),
    width=st.integers(40, 120),
    merged=st.booleans(),
    data=st.data(),
)
def test_the_grid_of_a_view_shows_every_cell_once_and_in_order(
    times: list[float], width: int, merged: bool, data: st.DataObject
) -> None:
    texts = [chr(0x100 + column) for column in range(len(times))]
    rows = [GridRow("one"), GridRow("other")]
    for column, text in enumerate(texts):
        rows[data.draw(st.integers(0, 1))].cells[column] = text
    alone = data.draw(st.frozensets(st.integers(0, len(times) - 1)))
    panels = draw(times, rows, width=width, merged=merged, alone=alone)
    for row in rows:
        lines = "".join(line for panel in panels for line in panel if line.startswith(row.label))
        assert [text for text in lines if text in texts] == [row.cells[column] for column in sorted(row.cells)]
    assert all(len(line) <= width for panel in panels for line in panel)


def test_columns_of_one_time_are_merged_unless_they_stay_alone() -> None:
    rows = [GridRow("a", {0: "x", 2: "y", 4: "z"}), GridRow("b", {1: "1", 3: "2"})]
    times = [0.0, 0.0, 0.0, 0.0, 1.0]
    assert draw(times, rows, width=80, merged=False) == [["seconds".ljust(3) + "0    1", "a  x y ~z", "b   1 2~"]]
    assert draw(times, rows, width=80, merged=True)[0][1:] == ["a  xy~z", "b  12~"]
    assert draw(times, rows, width=80, merged=True, alone={1})[0][1:] == ["a  x y~z", "b   12~"]


def test_a_grid_without_columns_is_empty() -> None:
    assert draw([], [GridRow("one")], width=80, merged=False) == []


def simulated(personality: PersonalityName, *planned: Fault, n: int = 4, schedule: Schedule | None = None) -> Run:
    async def handle(message: Message) -> None:
        await anyio.sleep(0.01)
        if message.position == 1 and message.attempt == 1:
            raise ValueError("once")

    async def test(world: World) -> None:
        world.produce("orders", n, keys=2)
        world.workers(2, App(handler=handle, settings=Settings(retry=Retry(backoff=0.1))))
        await world.settled()

    plan = Plan(personality, 5, planned, schedule or Schedule(), limit=n)
    return run_plan(plan, Conditions(test=test))


@pytest.mark.parametrize("personality", PERSONALITIES)
def test_the_view_of_a_run_shows_its_faults_and_their_effects(personality: PersonalityName) -> None:
    run = simulated(personality, Fault(14, "crash", 0, 1.0), Fault(25, "rebalance"))
    text = render(run)
    assert text == render(simulated(personality, Fault(14, "crash", 0, 1.0), Fault(25, "rebalance")))
    head, workers, *lines = text.splitlines()
    assert head == f"{personality}, seed 5, at most 4 messages, 2 faults, 0 deviations; {run.seconds:g} virtual seconds"
    assert "(crashed)" in workers
    assert len(lines) + 2 <= LINES
    assert any("fault: crash of " in line for line in lines)
    assert any("fault: rebalance, at boundary 25" in line for line in lines)
    assert any("assigned" in line for line in lines)
    # A crash has a column after earlier events, and a handler that was cut off ends there.
    started_at = {row.position for segment in run.segments for row in segment.rows if row.event == "started"}
    joined = "\n".join(lines)
    assert all(
        f"A{position}" in joined or f"B{position}" in joined or f"C{position}" in joined for position in started_at
    )
    assert "!r" in joined
    crash = next(moment for moment in run.moments if moment.fault.kind == "crash")
    gone = next(segment for segment in run.segments if segment.member == crash.whom)
    assert gone.crashed
    assert all(row.mono < crash.at for row in gone.rows)
    assert crash.at - gone.rows[-1].mono < 0.1
    assert ("c commit" if personality == "kafka" else "k ack sent") in joined


def test_the_view_names_a_run_without_workers() -> None:
    async def test(world: World) -> None:
        raise ValueError("at once")

    run = run_plan(Plan("kafka", 1, (), Schedule(((3, 1),), (4,))), Conditions(test=test))
    assert render(run).splitlines()[1:] == ["no worker has begun"]
    assert ", 1 deviation, 1 jump; " in render(run)


def test_a_large_run_is_cut_to_fit() -> None:
    run = simulated("kafka", Fault(30, "rebalance"), n=300)
    assert len(render(run).splitlines()) <= LINES


def test_the_moments_of_a_view_are_the_faults_of_its_run() -> None:
    assert len(faults(crash=1)) == 1
    # No message of partition 2 was delivered yet.
    redeliveries = Fault(9, "redeliver", 0), Fault(10, "redeliver", 2)
    run = simulated("jetstream", Fault(5, "freeze", 1, 0.5), *redeliveries, Fault(12, "clock_jump", 0, 1.0))
    assert [(moment.fault.kind, moment.whom) for moment in run.moments] == [
        ("freeze", run.moments[0].whom),
        ("redeliver", "partition 0"),
        ("clock_jump", ""),
    ]
    assert run.moments[0].whom in ("w-1", "w-2")
    assert [moment.at for moment in run.moments] == sorted(moment.at for moment in run.moments)
