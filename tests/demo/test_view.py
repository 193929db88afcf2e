"""The view of a run is a panel and a table on a terminal, and plain lines elsewhere."""

from __future__ import annotations

import asyncio
import io
from typing import Any

import pytest
from rich.console import Console

from demo import Progress
from demo.progress import Kill
from demo.view import FOOTER, LiveView, PlainView, Rate, best_view, line
from tests.demo.test_report import report

STATUS: dict[str, Any] = {
    "in_flight": 17,
    "max_in_flight": 50,
    "running": 9,
    "held": 2,
    "retries": 5,
    "floor": 1_234,
    "oldest_key": "029576e5",
    "oldest_age": 0.42,
}


def progress(**changes: Any) -> Progress:
    state = {"events": 2_000, "phase": "under lanes", "starts": 1, "stored": 990, "dead_letters": 10}
    return Progress(**{**state, "status": STATUS, **changes})


def test_the_plain_line_has_progress_rate_and_oldest_message() -> None:
    assert line(progress(), 812.0) == (
        "under lanes: 1,000 of 2,000 done, 812/s, 17 in flight, 9 running, 2 held, 5 retries, floor 1,234, "
        "oldest 029576e5 0.42 s"
    )
    assert line(progress(starts=0, phase="publishing", published=7), 0.0) == ("publishing: 7 of 2,000 events published")
    assert line(progress(stored=1_990, dead_letters=11), 0.0).startswith("under lanes: 2,000 of 2,000 done")
    assert line(progress(answering=False, status={}), 0.0).endswith("the server does not answer: waiting for it")


def test_the_rate_is_that_of_the_last_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    rate = Rate()
    assert rate(0) == 0.0
    now = 101.0
    assert rate(500) == 500.0
    now = 103.0
    assert rate(700) == 100.0


def test_the_plain_report_names_broken_promises(capsys: pytest.CaptureFixture[str]) -> None:
    PlainView().report(report())
    assert "every promise was kept" in capsys.readouterr().out
    PlainView().report(report(lost=[("a", 1)]))
    printed = capsys.readouterr().out
    assert "lost                             1   <-- BROKEN" in printed
    assert "BROKEN: lost: 1 (neither stored nor dead-lettered): a step 1" in printed


def live() -> tuple[LiveView, io.StringIO]:
    screen = io.StringIO()
    view = LiveView()
    view._console = Console(file=screen, width=100, force_terminal=True, color_system=None)
    return view, screen


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_the_live_panel_shows_the_present_figures() -> None:
    view, screen = live()
    state = progress(answering=False, serial_rate=83.5)
    async with view.showing(state):
        await asyncio.sleep(0)
    for words in ("1,000 of 2,000 done", "83.5 messages/s", "17 of 50", "029576e5, 0.42 s", "does not answer"):
        assert words in screen.getvalue()


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_kill_is_a_line_of_its_own_in_the_live_view_and_the_footer_explains_two_rows() -> None:
    view, screen = live()
    kill = Kill("worker-1", 990, 1.25)
    state = progress(serial_rate=83.5, kills=[kill])
    async with view.showing(state):
        await asyncio.sleep(0)
    lines = [" ".join(line.strip("│ ").split()) for line in screen.getvalue().splitlines()]
    assert "kill -9 worker-1 after 990 events, at 1.25 s" in lines
    assert "measured one at a time 83.5 messages/s, in a sample before the run" in lines
    for explained in FOOTER:
        assert explained in " ".join(screen.getvalue().replace("│", " ").split())
        assert explained.partition(":")[0] in ("floor", "oldest key")
    kill.over("worker-2", 1.85)
    kill.over("worker-3", 9.0)
    view, screen = live()
    async with view.showing(state):
        await asyncio.sleep(0)
    assert "worker-1 after 990 events, at 1.25 s; worker-2 took over 0.60 s later" in screen.getvalue()


async def passes(count: int) -> None:
    """Let other tasks run."""
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_kill_is_a_line_of_its_own_in_the_plain_view(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("demo.view._REDRAW", 0.0)
    state = progress()
    async with PlainView().showing(state):
        await passes(5)
        state.kills.append(Kill("worker-1", 990, 1.25))
        await passes(5)
        state.kills[0].over("worker-2", 1.85)
        await passes(5)
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("kill -9: ")]
    assert printed == [
        "kill -9: worker-1 after 990 events, at 1.25 s",
        "kill -9: worker-1 after 990 events, at 1.25 s; worker-2 took over 0.60 s later",
    ]


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_the_plain_view_does_not_print_the_same_line_twice(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("demo.view._REDRAW", 0.0)
    monkeypatch.setattr("demo.view._LINE_EVERY", 0.0)
    monkeypatch.setattr(Rate, "__call__", lambda self, done: 0.0)
    state = progress(phase="checking")
    async with PlainView().showing(state):
        await passes(5)
        state.stored += 1
        await passes(5)
    first, second = (line.partition(", ")[0] for line in capsys.readouterr().out.splitlines())
    assert (first, second) == ("checking: 1,000 of 2,000 done", "checking: 1,001 of 2,000 done")


def test_the_live_report_is_a_table_with_broken_promises() -> None:
    view, screen = live()
    view.report(report(lost=[("a[bold]", 1)]))
    assert "speed-up" in screen.getvalue()
    assert "BROKEN: lost: 1 (neither stored nor dead-lettered): a[bold] step 1" in screen.getvalue()
    view.report(report())
    assert "every promise was kept" in screen.getvalue()


def test_where_stdout_is_no_terminal_the_view_is_plain() -> None:
    assert isinstance(best_view(), PlainView)
