"""The ledger: the outcome of every write, in a SQLite file that only the parent process opens.

The ledger applies a write of (case, step) if the step is above the last step of its case. Each applied step adds a row
to an append-only table without a unique key, so a step that applies twice has two rows. A refused write is a *repeat*
if the ledger already has the step. A repeat is harmless, because delivery is at least once. Any other refused write is
an *order violation*.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, NamedTuple

from demo.errors import DemoError

Verdict = Literal["applied", "repeat", "violation"]
Step = tuple[str, int]
"""A case, and the number of a step in the case."""

_TABLES: Final = """
CREATE TABLE position (case_id TEXT PRIMARY KEY, step INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE applied (case_id TEXT NOT NULL, step INTEGER NOT NULL, epoch INTEGER NOT NULL);
CREATE INDEX applied_by_step ON applied (case_id, step);
CREATE TABLE refused (case_id TEXT NOT NULL, step INTEGER NOT NULL, epoch INTEGER NOT NULL, verdict TEXT NOT NULL);
"""
_ADVANCE: Final = (
    "INSERT INTO position VALUES (?, ?) "
    "ON CONFLICT (case_id) DO UPDATE SET step = excluded.step WHERE excluded.step > position.step"
)


class Apply(NamedTuple):
    """A handler's request to store a step.

    Attributes:
        case: Case of the step.
        step: Number of the step within its case.
        epoch: Epoch of the assignment that delivered the step.
    """

    case: str
    step: int
    epoch: int


@dataclass(frozen=True, kw_only=True)
class Audit:
    """The ledger compared with the log. The lists are in rising order.

    Attributes:
        stored: Number of distinct stored events.
        repeats: Number of writes that the ledger refused as repeats.
        violations: Steps whose write the ledger refused as an order violation.
        doubled: Events stored more than once.
        lost: Events neither stored nor dead-lettered.
        foreign: Stored steps outside the log.
    """

    stored: int
    repeats: int
    doubled: Sequence[Step]
    lost: Sequence[Step]
    violations: Sequence[Step]
    foreign: Sequence[Step]


class Ledger:
    """One ledger in one new file. Not thread-safe. Every call blocks while SQLite works.

    Args:
        path: Path of the new file.

    Attributes:
        stored: Number of applied writes.
        repeats: Number of writes that the ledger refused as repeats.
        violations: Number of writes that the ledger refused as order violations.

    Raises:
        DemoError: The file is not writable.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stored = 0
        self.repeats = 0
        self.violations = 0
        try:
            # The ledger begins and ends its transactions itself, one for a whole batch.
            self._database = sqlite3.connect(path, isolation_level=None)
            self._cursor = self._database.cursor()
            self._cursor.execute("PRAGMA journal_mode = WAL")
            # The file need not survive a crash of the machine, and an fsync for each batch is slow.
            self._cursor.execute("PRAGMA synchronous = OFF")
            self._cursor.executescript(_TABLES)
        except sqlite3.Error as error:
            raise self._failed(error) from None

    def apply(self, batch: Iterable[Apply]) -> list[Verdict]:
        """Apply a batch in one transaction. Return the verdicts in the order of the batch, after the commit."""
        cursor = self._cursor
        verdicts: list[Verdict] = []
        try:
            cursor.execute("BEGIN IMMEDIATE")
            for case, step, epoch in batch:
                if cursor.execute(_ADVANCE, (case, step)).rowcount:
                    cursor.execute("INSERT INTO applied VALUES (?, ?, ?)", (case, step, epoch))
                    verdicts.append("applied")
                    continue
                stored = cursor.execute("SELECT 1 FROM applied WHERE case_id = ? AND step = ?", (case, step))
                verdict: Verdict = "violation" if stored.fetchone() is None else "repeat"
                cursor.execute("INSERT INTO refused VALUES (?, ?, ?, ?)", (case, step, epoch, verdict))
                verdicts.append(verdict)
            cursor.execute("COMMIT")
        except sqlite3.Error as error:
            raise self._failed(error) from None
        repeats, violations = verdicts.count("repeat"), verdicts.count("violation")
        self.stored += len(verdicts) - repeats - violations
        self.repeats += repeats
        self.violations += violations
        return verdicts

    def audit(self, events: Collection[Step], dead_letters: Collection[Step]) -> Audit:
        """Compare the ledger with all events of the log and with the written dead letters. Blocks."""
        try:
            rows = self._cursor.execute("SELECT case_id, step, count(*) FROM applied GROUP BY case_id, step").fetchall()
            refused = self._cursor.execute("SELECT case_id, step, verdict FROM refused").fetchall()
        except sqlite3.Error as error:
            raise self._failed(error) from None
        stored = {(case, step) for case, step, _ in rows}
        wanted = set(events)
        return Audit(
            stored=len(stored),
            repeats=sum(verdict == "repeat" for _, _, verdict in refused),
            doubled=sorted((case, step) for case, step, times in rows if times > 1),
            lost=sorted(wanted - stored - set(dead_letters)),
            violations=sorted((case, step) for case, step, verdict in refused if verdict == "violation"),
            foreign=sorted(stored - wanted),
        )

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._database.close()

    def _failed(self, error: sqlite3.Error) -> DemoError:
        return DemoError(
            f"the ledger {self.path} cannot be used ({error}): free space on its disk, or choose another --keep or "
            "TMPDIR"
        )
