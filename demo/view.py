"""The view of a run: a live panel on a terminal, otherwise a line every two seconds and at each kill and phase."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Final, Protocol

import anyio

from demo.progress import Progress

if TYPE_CHECKING:
    from rich.panel import Panel

_REDRAW: Final = 0.25
_LINE_EVERY: Final = 2.0
FOOTER: Final = (
    "floor: every message below this number is settled; on Kafka the sum of the floors of all partitions.",
    "oldest key: the hash of the key whose message is unfinished for the longest time, and that time.",
)
"""Meaning of two rows of the panel."""

_RATE_WINDOW: Final = 2.0
"""Length in seconds of the interval of the average rate."""


class Outcome(Protocol):
    """The part of a report that the demo shows."""

    @property
    def ok(self) -> bool:
        """Whether the run kept every promise."""

    @property
    def broken(self) -> list[str]:
        """Broken promises, one line each."""

    def rows(self) -> list[tuple[str, str, bool]]:
        """Return the rows of the table: name, value, and whether the value is as promised."""

    def json(self) -> str:
        """Return the report as one line of JSON."""


class View(Protocol):
    """A display of the progress and the report of a run."""

    def showing(self, progress: Progress) -> AbstractAsyncContextManager[None]:
        """Show the progress during the context."""

    def report(self, report: Outcome) -> None:
        """Show the report with its broken promises."""


class Rate:
    """A counter of events per second over the last ``_RATE_WINDOW`` seconds."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, int]] = []

    def __call__(self, done: int) -> float:
        """Return the current rate. ``done`` is the number of stored events."""
        now = time.monotonic()
        self._samples = [s for s in self._samples if s[0] >= now - _RATE_WINDOW]
        self._samples.append((now, done))
        first, before = self._samples[0]
        return (done - before) / (now - first) if now > first else 0.0


def best_view() -> View:
    """Return the live view if stdout is a terminal, else the plain view."""
    return LiveView() if sys.stdout.isatty() else PlainView()


class PlainView:
    """Lines of plain text, for a log or a pipe."""

    @asynccontextmanager
    async def showing(self, progress: Progress) -> AsyncIterator[None]:
        """See ``View``."""
        async with _beside(self._print(progress)):
            yield

    def report(self, report: Outcome) -> None:
        """See ``View``."""
        print()
        for name, value, good in report.rows():
            print(f"{name:<32} {value}{'' if good else '   <-- BROKEN'}")
        print()
        for line in report.broken:
            print(f"BROKEN: {line}")
        print("a promise broke" if report.broken else "every promise was kept", flush=True)

    async def _print(self, progress: Progress) -> None:
        rate = Rate()
        phase, printed, last = "", 0.0, ""
        kills: list[str] = []
        while True:
            now = time.monotonic()
            speed = rate(progress.stored)
            if progress.phase != phase or now - printed >= _LINE_EVERY:
                phase, printed = progress.phase, now
                # On a busy machine a phase without news may last for many lines.
                if (text := line(progress, speed)) != last:
                    last = text
                    print(text, flush=True)
            before, kills = kills, [str(kill) for kill in progress.kills]
            for kill in kills:
                if kill not in before:
                    print(f"kill -9: {kill}", flush=True)
            await asyncio.sleep(_REDRAW / 5)


@asynccontextmanager
async def _beside(job: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Run ``job`` during the context."""
    task = asyncio.create_task(job)
    try:
        yield
    finally:
        task.cancel()
        with anyio.CancelScope(shield=True):
            await asyncio.gather(task, return_exceptions=True)


def line(progress: Progress, rate: float) -> str:
    """Return the progress as one line."""
    status = progress.status
    text = f"{progress.phase}: "
    if progress.starts == 0:
        return f"{text}{progress.published:,} of {progress.events:,} events published"
    text += f"{progress.done:,} of {progress.events:,} done, {rate:,.0f}/s"
    if status:
        text += (
            f", {status['in_flight']} in flight, {status['running']} running, {status['held']} held, "
            f"{status['retries']} retries, floor {status['floor']:,}, oldest {status['oldest_key'] or '-'} "
            f"{status['oldest_age']:.2f} s"
        )
    return text if progress.answering else f"{text} -- the server does not answer: waiting for it"


class LiveView:
    """A panel that redraws itself in place; needs ``rich``."""

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console()

    @asynccontextmanager
    async def showing(self, progress: Progress) -> AsyncIterator[None]:
        """See ``View``."""
        from rich.live import Live

        rate = Rate()
        with Live(console=self._console, auto_refresh=False, transient=True) as live:

            async def redraw() -> None:
                while True:
                    live.update(self._panel(progress, rate(progress.stored)), refresh=True)
                    await asyncio.sleep(_REDRAW)

            async with _beside(redraw()):
                yield

    def report(self, report: Outcome) -> None:
        """See ``View``."""
        from rich.table import Table

        table = Table(title="demo", title_justify="left", show_header=False)
        table.add_column(style="bold")
        table.add_column(justify="right")
        for name, value, good in report.rows():
            table.add_row(name, value, style=None if good else "bold red")
        self._console.print(table)
        for broken in report.broken:
            self._console.print(f"BROKEN: {broken}", style="bold red", markup=False, highlight=False)
        if not report.broken:
            self._console.print("every promise was kept", style="bold green")

    def _panel(self, progress: Progress, rate: float) -> Panel:
        from rich.console import Group
        from rich.panel import Panel
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        counted = progress.done if progress.starts else progress.published
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="bold")
        grid.add_column()
        grid.add_row("events", ProgressBar(total=max(1, progress.events), completed=counted, width=40))
        grid.add_row("", f"{counted:,} of {progress.events:,} {'done' if progress.starts else 'published'}")
        if progress.serial_rate:
            grid.add_row(
                "measured one at a time", f"{progress.serial_rate:,.1f} messages/s, in a sample before the run"
            )
        if progress.starts:
            status = progress.status
            grid.add_row("messages/s", f"{rate:,.0f}")
            if status:
                bound = status.get("max_in_flight", 0)
                grid.add_row("in flight", f"{status.get('in_flight', 0):,} of {bound:,}")
                grid.add_row("running", f"{status.get('running', 0):,}")
                grid.add_row("retries", f"{status.get('retries', 0):,}, {status.get('held', 0)} held now")
                grid.add_row("floor", f"{status.get('floor', 0):,}")
                age = status.get("oldest_age", 0.0)
                grid.add_row("oldest key", f"{status.get('oldest_key') or '-'}, {age:.2f} s")
            grid.add_row("dead letters", str(progress.dead_letters))
            grid.add_row("out of order", str(progress.violations))
        for kill in progress.kills:
            grid.add_row("kill -9", str(kill), style="red" if kill.by else "bold red")
        now = progress.phase
        if not progress.answering:
            now += " [bold yellow](the server does not answer: waiting for it)[/]"
        footer = [Text(each, style="dim") for each in FOOTER] if progress.starts and progress.status else []
        return Panel(Group(grid, *footer), title="demo", subtitle=now, expand=False)
