"""Progress on the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from lanes.cli.views import printable
from lanes_spark.driver.progress import Progress
from lanes_spark.driver.replay import Report

__all__ = ["described", "progress_bar", "summary"]


@contextmanager
def progress_bar() -> Iterator[Callable[[Progress], None]]:
    """Progress on stderr, where that is a terminal; what is to be called with it."""
    console = Console(stderr=True)
    columns = [
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("positions"),
        TimeElapsedColumn(),
    ]
    with Bar(*columns, console=console, disable=not console.is_terminal) as bar:
        shown = bar.add_task("reading", total=None)

        def show(reached: Progress) -> None:
            done = reached.positions - reached.left
            bar.update(shown, description=described(reached), total=reached.positions, completed=done)

        yield show


def described(reached: Progress) -> str:
    """One line of it. Keys are hashed."""
    batch = (
        f"batch {reached.batches + 1} in {reached.running} task(s)" if reached.running else f"{reached.batches} batches"
    )
    text = f"{batch}: {reached.delivered:,} rows, {reached.rate:,.0f} rows/s, lag {reached.left:,}"
    if reached.dead_lettered:
        text += f", {reached.dead_lettered:,} dead-lettered"
    oldest = reached.oldest
    if oldest is not None:
        key = "no key" if oldest.key is None else f"key {oldest.key}"
        where = f"{printable(oldest.partition)} {oldest.position}"
        text += f"; oldest {where}, {key}, attempt {oldest.attempt}, {oldest.age:.1f} s"
    return text


def summary(report: Report) -> str:
    """A report in one line."""
    rate = report.delivered / report.seconds if report.seconds else 0.0
    return (
        f"{report.delivered:,} delivered, {report.finished:,} finished, {report.dead_lettered:,} of them "
        f"dead-lettered, {report.skipped:,} skipped; {report.batches} batches in {report.seconds:.1f} s, "
        f"{rate:,.0f} rows/s"
    )
