"""Audits on a real Spark: one job audits many histories, with and without a planted fault, and finds each fault."""

from __future__ import annotations

from pathlib import Path
from random import randrange
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest

from lanes.errors import ConfigError, SourceError
from lanes_spark.audits.audit import audit
from lanes_spark.audits.verdicts import AUDITED, CAUSES
from lanes_spark.tables.table import ParquetTable
from memsource import check_files
from tests.memsource.checkers.journals import ended, message, opened
from tests.memsource.checkers.rows import (
    Fields,
    Rows,
    ack,
    assigned,
    at,
    delivered,
    owned,
    produced,
    ran,
    redelivered,
    segment,
    sent,
    started,
)
from tests.memsource.checkers.rows import ended as ended_row
from tests.memsource.checkers.rows import handled as handled_rows
from tests.memsource.checkers.rows import message as message_row
from tests.spark.histories import audited, checked, differing, fresh

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module", autouse=True)
def interpreted(spark: Any) -> None:
    """For little data, compiling the plans and their expressions would take longer than running them. The slow tests of
    ``test_audit_agrees`` compile the expressions."""
    spark.conf.set("spark.sql.codegen.factoryMode", "NO_CODEGEN")
    spark.conf.set("spark.sql.codegen.wholeStage", "false")
    spark.conf.set("spark.sql.adaptive.enabled", "false")
    spark.conf.set("spark.sql.shuffle.partitions", "1")


def letter(event: str) -> Fields:
    return message_row(f"dlq_{event}", 0)


BLOCKED = message_row("archived", 0)
SHARES = {"exclusive": False}


def later(seconds: float, *rows: Fields | Rows) -> Rows:
    """Return the rows with times ``seconds`` after the start."""
    return at(100.0 + seconds, *rows)


CONTROLS: dict[str, tuple[list[Rows], dict[str, int]]] = {
    "nothing": ([segment(handled_rows(1), handled_rows(2))], {}),
    "swap": (
        [segment(delivered(1), delivered(2), ran(2), ran(1), handled_rows(3))],
        {"PerKeyOrder": 2},
    ),
    "drop": (
        [segment(produced(1, "other"), produced(2), assigned(1), handled_rows(2)[:-1], sent(3))],
        {"AtLeastOnce": 1},
    ),
    "duplicate": ([segment(handled_rows(1), ran(1), handled_rows(2))], {"PerKeyOrder": 1}),
    "overlap": (
        [segment(delivered(1), started(1), started(1, attempt=2), ended_row(1), ended_row(1, attempt=2))],
        {"NoOverlap": 1},
    ),
    "overlap of two processes": (
        [
            segment(delivered(1), started(1), [owned("revoking", partition="S/1")] * 20, ended_row(1)),
            segment(delivered(1), started(1), ended_row(1), member="m-2", pid=2, start=100.01),
        ],
        {"NoOverlap": 1},
    ),
    "forged assignment": (
        [segment(delivered(1), started(1), ended_row(1, assignment=2), delivered(2), ran(2))],
        {"PerKeyOrder": 1, "NoOverlap": 1},
    ),
    "two owners at once": (
        [
            segment(assigned(), *later(0.03, ran(1), owned("drained"), owned("revoked"))),
            segment(assigned(), owned("drained"), member="m-2", pid=2, start=100.02),
        ],
        {"ExclusiveOwner": 1},
    ),
    "two owners, one of which was lost": (
        [
            segment(assigned(), *later(0.03, started(1), owned("drained"), owned("revoked"))),
            segment(assigned(), owned("lost"), member="m-2", pid=2, start=100.02),
        ],
        {},
    ),
    "attempts of tasks": (
        [
            segment(
                assigned(None), handled_rows(0, "again"), delivered(1), delivered(2), ran(1),
                started(2), ended_row(2, result="error"),
                started(2, attempt=2), ended_row(2, result="cancelled", attempt=2), rules=SHARES, end="failed",
            ),
            segment(assigned(None), handled_rows(3, "other"), member="m-2", pid=2, rules=SHARES, start=100.001),
            segment(
                assigned(None), handled_rows(0, "again"), handled_rows(1), handled_rows(2),
                member="m-3", pid=3, rules=SHARES, start=101.0,
            ),
        ],
        {},
    ),
    "attempts of tasks at once": (
        [
            segment(assigned(None), delivered(1), started(1), *later(0.05, ended_row(1)), rules=SHARES),
            segment(assigned(None), handled_rows(1), member="m-2", pid=2, rules=SHARES, start=100.02),
        ],
        {"NoOverlap": 1},
    ),
    "a lease held against another member": (
        [
            segment(owned("leased", deadline=102.0), delivered(0), started(0), *later(1.5, ended_row(0))),
            segment(
                owned("leased", deadline=110.0), *later(1.0, ran(1)), member="m-2", pid=2
            ),
        ],
        {"PerKeyOrder": 1, "NoOverlap": 1},
    ),
    "started and acknowledged behind a lease": (
        [segment(owned("leased", deadline=100.004), delivered(1), started(1), ended_row(1), ran(1, attempt=2), ack(1))],
        {"PerKeyOrder": 1, "NoOverlap": 2},
    ),
    "lost between two owners": (
        [
            segment(assigned(0), delivered(0), delivered(1), ran(0), owned("lost")),
            segment(
                assigned(1), delivered(2, "other"), ran(2, "other"), sent(3), member="m-2", pid=2, start=101.0
            ),
        ],
        {"AtLeastOnce": 1},
    ),
    "commit past unfinished": (
        [segment(assigned(0), delivered(0), delivered(1), sent(1), ran(0), ran(1), sent(2))],
        {"NoCommitPastUnfinished": 1},
    ),
    "settled before its letter was": (
        [
            segment(
                delivered(1), started(1), ended_row(1, result="error"),
                owned("dlq_sent", position=1, key=delivered(1)["key"], attempt=1),
                owned("ack", position=1, key=delivered(1)["key"], attempt=1),
                owned("dlq_confirmed", position=1, key=delivered(1)["key"], attempt=1),
            )
        ],
        {"DeadLetterBeforeSettle": 1},
    ),
    "committed past a letter sent once more": (
        [segment(assigned(), delivered(0), ran(0), letter("sent"), letter("confirmed"), letter("sent"), sent(1))],
        {"DeadLetterBeforeSettle": 1},
    ),
    "committed past a letter of what was settled": (
        [segment(assigned(), delivered(0), ran(0), letter("sent"), redelivered(0, "settled"), sent(1))],
        {"DeadLetterBeforeSettle": 1},
    ),
    "committed past a letter of what ended then": (
        [segment(assigned(), delivered(0), letter("sent"), ran(0), sent(1))],
        {"DeadLetterBeforeSettle": 1},
    ),
    "committed past a letter that was confirmed": (
        [segment(assigned(), delivered(0), letter("sent"), letter("confirmed"), sent(1))],
        {},
    ),
    "a second letter of a blocked message": ([segment(BLOCKED, letter("sent"))], {"DeadLetterBeforeSettle": 1}),
    "a second letter of a message that ended after its fence": (
        [segment(assigned(None), BLOCKED, owned("lost"), ended_row(0), letter("confirmed"), letter("sent"))],
        {"DeadLetterBeforeSettle": 1},
    ),
    "a second letter of what was no longer blocked": (
        [
            segment(
                BLOCKED, letter("confirmed"), letter("sent"), BLOCKED, ran(0), letter("sent"),
                BLOCKED, message_row("abandoned", 0), letter("sent"), BLOCKED,
            ),
            segment(letter("sent"), member="m-2", pid=2, start=101.0),
        ],
        {},
    ),
    "started beside a handler whose letter was confirmed": (
        [segment(delivered(0), delivered(1), started(0), letter("sent"), letter("confirmed"), ran(1))],
        {"NoOverlap": 1},
    ),
    "a letter sent behind the commit": (
        [segment(assigned(), delivered(0), ran(0), sent(1), letter("sent"), sent(1))],
        {},
    ),
    "overtakes what came late": (
        [segment(handled_rows(1), redelivered(1, "late"), handled_rows(2), ran(1))],
        {"PerKeyOrder": 1},
    ),
    "came late behind what waits": (
        [segment(handled_rows(1), delivered(2), redelivered(1, "late"), ran(2), ran(1))],
        {},
    ),
    "came late behind what waits, and once more": (
        [
            segment(
                handled_rows(1), delivered(2), delivered(1), redelivered(1, "late"), delivered(1),
                redelivered(1, "held"), ran(2), ran(1),
            )
        ],
        {},
    ),
    "came late behind what came late": (
        [
            segment(
                handled_rows(1), handled_rows(2), redelivered(2, "late"), redelivered(1, "late"), delivered(3),
                ran(2), ran(3), ran(1),
            )
        ],
        {},
    ),
}  # fmt: skip


def missing() -> dict[str, list[Rows]]:
    """Return the same history, complete and with missing rows; the remaining rows of one of them break a promise."""
    whole = segment(handled_rows(1), handled_rows(2))
    return {
        "whole": [whole],
        "crashed": [[{**whole[0], "incomplete": 1}, *whole[1:-1]]],
        "holed": [[row for row in segment(handled_rows(1), delivered(2), ran(3), ran(2)) if row["n"] != 4]],
        "headless": [whole[1:]],
    }


def test_the_audit_finds_each_planted_fault_and_nothing_else(spark: Any, tmp_path: Path) -> None:
    histories = {name: segments for name, (segments, _) in CONTROLS.items()}
    # A different seed in each run; `--randomly-seed` repeats a run.
    seed = randrange(2**32)
    others = fresh(seed, 30)
    found, figures = audited(spark, histories | missing() | others, tmp_path / "histories")
    assert not differing(others, found)[0], f"fresh({seed}, 30)"
    counts = {name: {one.name: one.violations for one in found[name].values() if one.violations} for name in histories}
    assert counts == {name: expected for name, (_, expected) in CONTROLS.items()}
    for name, segments in histories.items():
        assert {one.name: one.status for one in found[name].values()} == checked(segments), name
    assert {cause: figures["attempts of tasks"][cause] for cause in CAUSES if figures["attempts of tasks"][cause]} == {
        "retry": 1,
        "takeover": 1,
        "repeat": 2,
    }
    (witness,) = found["overlap"]["NoOverlap"].witnesses
    key = delivered(1)["key"]
    assert witness == (
        f"S/0 position 1 key {key}, m-1 row 4: started while another message of its key was running in its process"
    )
    reasons = {name: {one.reasons for one in found[name].values()} for name in missing()}
    assert reasons["whole"] == {()}
    assert all("m-1: no end row: the last rows may be missing" in why for why in reasons["crashed"])
    assert all("m-1: rows are missing in between: dropped, or in a missing file" in why for why in reasons["holed"])
    assert all("m-1: no begin row: the first rows are missing" in why for why in reasons["headless"])
    for name in ("crashed", "holed", "headless"):
        assert {one.status for one in found[name].values()} == {"unproven"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["drop", "lost between two owners"])
def test_a_committed_message_without_rows_is_lost(spark: Any, tmp_path: Path, name: str) -> None:
    segments, expected = CONTROLS[name]
    found, _ = audited(spark, {name: segments}, tmp_path / "alone")
    assert {one.name: one.violations for one in found[name].values() if one.violations} == expected
    assert {one.name: one.status for one in found[name].values()} == checked(segments)


@pytest.mark.slow
def test_a_journal_is_audited_where_it_lies(spark: Any, tmp_path: Path) -> None:
    journal, recording = opened(tmp_path / "live", rotate_bytes=1)
    twice = message(9)
    recording.delivered([twice], 2.0)
    recording.started(twice, 2.0)
    recording.started(twice, 2.0)
    for position in range(10, 13):
        other = message(position, b"other")
        recording.delivered([other], 2.0)
        recording.started(other, 2.0)
        recording.ended(other, "ok", 2.0)
        recording.acks([other], 2.0)
    recording.ended(twice, "ok", 3.0)
    recording.acks([twice], 3.0)
    ended(journal, recording)
    (path,) = (tmp_path / "live").glob("*000001.parquet")
    # A copied history counts once, and an incomplete history does not count.
    (tmp_path / "live" / "copy.parquet").write_bytes(path.read_bytes())
    (tmp_path / "live" / ".half.parquet.tmp").write_bytes(b"PAR1")
    running = opened(tmp_path / "live", member="m-2", rotate_after=None)
    result = audit(spark, str(tmp_path / "live"), findings_to=str(tmp_path / "findings"))
    assert (result.status, result.processes, result.rows, result.unfinished) == (1, 1, 19, 2)
    assert {one.name: one.status for one in result.verdicts} == {
        name: "violated" if name == "NoOverlap" else "held" for name in AUDITED
    }
    verdicts = {one.name: one for one in check_files([tmp_path / "live"]).verdicts}
    assert [(one.checked, one.violations) for one in result.verdicts] == [
        (verdicts[name].checked, verdicts[name].violations) for name in AUDITED
    ]
    assert result.duplicates == dict.fromkeys(CAUSES, 0) | {"retry": 1}
    (row,) = pq.read_table(tmp_path / "findings").to_pylist()
    assert (row["checker"], row["member"], row["partition"], row["position"]) == ("NoOverlap", "m-1", "S/0", 9)
    assert result.findings.columns == list(row)
    ended(*running)
    result = audit(spark, str(tmp_path / "live"))
    assert (result.status, result.processes, result.unfinished) == (1, 2, 1)


@pytest.mark.slow
def test_a_message_of_the_source_without_a_handler_is_lost(spark: Any, tmp_path: Path) -> None:
    journal, recording = opened(tmp_path / "live")
    recording.delivered([message(position) for position in range(1, 4)], 2.0)
    for position in (1, 2):
        recording.started(message(position), 2.0)
        recording.ended(message(position), "ok", 2.0)
    ended(journal, recording)
    columns = {"key": [b"a"] * 4, "partition": [0, 0, 0, 1], "offset": [1, 2, 3, 2], "value": [b""] * 4}
    pq.write_table(pa.table(columns | {"partition": pa.array(columns["partition"], pa.int32())}), tmp_path / "table")
    found = audit(spark, str(tmp_path / "live"), source=ParquetTable(path=str(tmp_path / "table"), topic="S"))
    lost = {one.name: (one.status, one.checked, one.witnesses) for one in found.verdicts}["AtLeastOnce"]
    what = "key none, no row: in the source, and never handled"
    assert lost == ("violated", 4, (f"S/0 position 3 {what}", f"S/1 position 2 {what}"))
    part = spark.createDataFrame([("S/0", 1), ("S/0", 2)], "partition string, position bigint")
    found = audit(spark, str(tmp_path / "live"), source=part)
    assert {one.name: (one.status, one.reasons) for one in found.verdicts}["AtLeastOnce"] == (
        "unproven",
        ("1 messages were left at the broker: neither settled nor handled",),
    )
    # An empty source does not tell which messages had to be handled.
    found = audit(spark, str(tmp_path / "live"), source=part.where("position > 2"))
    assert found.status == 2
    assert {one.name: (one.status, one.checked, one.reasons) for one in found.verdicts}["AtLeastOnce"] == (
        "unproven",
        0,
        (
            "0 messages are in the source, so no message had to be handled",
            "1 messages were left at the broker: neither settled nor handled",
        ),
    )
    with pytest.raises(SourceError, match="source: a row has no partition or no position; leave it out"):
        audit(spark, str(tmp_path / "live"), source=part.selectExpr("partition", "nullif(position, 2) AS position"))
    with pytest.raises(ConfigError, match="its column position, of type bigint, is missing"):
        audit(spark, str(tmp_path / "live"), source=part.select("partition"))


@pytest.mark.slow
def test_a_folder_without_a_journal_is_refused(spark: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="journal is empty"):
        audit(spark, [])
    with pytest.raises(SourceError, match="nowhere"):
        audit(spark, str(tmp_path / "nowhere"))
    journal, recording = opened(tmp_path / "journal")
    recording.started(message(1), 2.0)
    ended(journal, recording)
    (path,) = (tmp_path / "journal").glob("*.parquet")
    table = pq.read_table(path)
    (tmp_path / "strange").mkdir()
    pq.write_table(table.drop_columns(["member"]), tmp_path / "strange" / "a.parquet")
    with pytest.raises(ConfigError, match="its column member, of type string, is missing"):
        audit(spark, str(tmp_path / "strange"))
    (tmp_path / "empty").mkdir()
    pq.write_table(table.slice(0, 0), tmp_path / "empty" / "a.parquet")
    with pytest.raises(ConfigError, match="the journal has no rows"):
        audit(spark, str(tmp_path / "empty"))
    (tmp_path / "killed").mkdir()
    (tmp_path / "killed" / ".half.parquet.tmp").write_bytes(b"PAR1")
    with pytest.raises(ConfigError, match="has no complete file of a journal, only 1 incomplete files"):
        audit(spark, str(tmp_path / "killed"))
