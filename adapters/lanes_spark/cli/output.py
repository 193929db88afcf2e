"""Prints the output of the Spark commands: progress, reports and verdicts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Column, Table
from rich.text import Text

from lanes.dead_letter import printable
from lanes_spark.audits.audit import Audit
from lanes_spark.driver.progress import Progress
from lanes_spark.driver.run import Report

_STYLES: Final = {"held": "green", "violated": "bold red", "unproven": "yellow"}


@contextmanager
def progress_bar() -> Iterator[Callable[[Progress], None]]:
    """Yield a function that shows progress on stderr. If stderr is not a terminal, the function does nothing."""
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
    """Describe progress in one line. The line shows hashes in place of keys."""
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
    """Describe a report in one line."""
    rate = report.delivered / report.seconds if report.seconds else 0.0
    return (
        f"{report.delivered:,} delivered, {report.finished:,} finished, {report.dead_lettered:,} of them "
        f"dead-lettered, {report.skipped:,} skipped; {report.batches} batches in {report.seconds:.1f} s, "
        f"{rate:,.0f} rows/s"
    )


def lacking(report: Report) -> list[str]:
    """Describe rows that the journal may lack, and positions of the journal that the source lacks."""
    doubts = report.journal.doubts if report.journal else ()
    lines = [f"the journal may be incomplete: {doubt}" for doubt in doubts]
    if report.missing:
        lines.append(f"the source lacks {report.missing:,} of the positions that the journal selects")
    return lines


def printable_lines(text: str) -> str:
    """Escape terminal control characters, except line ends."""
    return "\n".join(printable(line) for line in text.splitlines())


def render(found: Audit, console: Console) -> None:
    """Print the verdicts as a table, and the violations and reasons below the table."""
    console.print(f"{found.rows:,} rows of {found.processes:,} processes", soft_wrap=True)
    came = ", ".join(f"{count:,} {cause}" for cause, count in found.duplicates.items() if count)
    console.print(f"repeated messages: {came or 'nothing'}", soft_wrap=True)
    table = Table("promise", "verdict", *(Column(heading, justify="right") for heading in ("checked", "violations")))
    for verdict in found.verdicts:
        status = Text(verdict.status, style=_STYLES[verdict.status])
        table.add_row(verdict.name, status, f"{verdict.checked:,}", f"{verdict.violations:,}")
    if found.unfinished:
        table.add_section()
        table.add_row("unfinished files", Text("not judged", style=_STYLES["unproven"]), f"{found.unfinished:,}", "")
    console.print(table)
    if found.unjudged:
        console.print(f"? {found.unjudged}", soft_wrap=True)
    for verdict in found.verdicts:
        for sign, lines in (("!", verdict.witnesses), ("?", verdict.reasons)):
            for line in lines:
                console.print(f"{sign} {verdict.name}: {printable(line)}", soft_wrap=True)
        if verdict.violations > len(verdict.witnesses):
            more = verdict.violations - len(verdict.witnesses)
            console.print(f"! {verdict.name}: and {more:,} more", soft_wrap=True)
