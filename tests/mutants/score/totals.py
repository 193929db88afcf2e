"""Counts of mutations by file, and the table that ``make mutants`` prints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tests.mutants.score.equivalents import EQUIVALENTS, Equivalent
from tests.mutants.score.mutations import Mutation
from tests.mutants.score.targets import Target
from tests.mutants.score.verdicts import Verdict

Key = tuple[str, str, str]
"""File, function and change."""


def key(each: Mutation | Equivalent) -> Key:
    return each.file, each.function, each.change


@dataclass
class FileScore:
    """The verdicts of one file.

    Attributes:
        file: Path of the file, relative to the project.
        killed: Mutations that a test killed.
        hung: Number of those that ended by a limit of time or memory, not by an assertion.
        equivalent: Survivors that the table names.
        survived: All other survivors.
    """

    file: str
    killed: list[Mutation] = field(default_factory=list)
    hung: int = 0
    equivalent: list[Mutation] = field(default_factory=list)
    survived: list[Mutation] = field(default_factory=list)

    def add(self, mutation: Mutation, verdict: Verdict) -> None:
        if verdict.killed_by:
            self.killed.append(mutation)
            self.hung += verdict.how != "test"
        elif verdict.how == "impossible":
            pass
        elif key(mutation) in _EQUIVALENT:
            self.equivalent.append(mutation)
        else:
            self.survived.append(mutation)

    @staticmethod
    def total(scores: Iterable[FileScore]) -> float:
        """Killed mutations in percent of those that are not equivalent; 100 without any."""
        scores = list(scores)
        killed = sum(len(score.killed) for score in scores)
        counted = killed + sum(len(score.survived) for score in scores)
        return 100 * killed / counted if counted else 100.0


def wrong_equivalents(
    named: Iterable[Equivalent], mutations: Iterable[Mutation], killed: Iterable[Mutation], files: Sequence[str]
) -> list[str]:
    """Return a line for each named equivalent of these files that no mutation has, or that a test kills.

    Args:
        named: The table.
        mutations: All mutations of the files.
        killed: Those that a test killed.
        files: The files.
    """
    known, dead = {key(each) for each in mutations}, {key(each) for each in killed}
    lines = []
    for each in named:
        if each.file not in files:
            continue
        if key(each) not in known:
            lines.append(f"equivalents.py: {each.file}: {each.function}: {each.change}: no such mutation; remove it")
        elif key(each) in dead:
            lines.append(f"equivalents.py: {each.file}: {each.function}: {each.change}: a test kills it; remove it")
    return lines


def table(target: Target, scores: Sequence[FileScore], every: int) -> str:
    """Return the table of a target.

    Args:
        target: The target.
        scores: The files.
        every: One mutation in so many was run.
    """
    rows = [
        ("file", "mutants", "killed", "by time", "equivalent", "survived", "score"),
        *(_row(score.file, [score]) for score in scores),
        _row(f"{target.name} (goal {target.goal}%)", scores),
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(
            [row[0].ljust(widths[0]), *(text.rjust(width) for text, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    ]
    if every > 1:
        lines.append(f"a sample: one mutation in {every}")
    return "\n".join(lines)


def _row(name: str, scores: Sequence[FileScore]) -> tuple[str, ...]:
    killed, hung = sum(len(score.killed) for score in scores), sum(score.hung for score in scores)
    equivalent, survived = sum(len(score.equivalent) for score in scores), sum(len(score.survived) for score in scores)
    percent = f"{FileScore.total(scores):.1f}%"
    return (name, *map(str, (killed + equivalent + survived, killed, hung, equivalent, survived)), percent)


_EQUIVALENT = {key(each) for each in EQUIVALENTS}
