"""A replay handles exactly the messages that a journal selects, on a real Spark."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, cast

import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest

import lanes
from lanes.core.types import Message, Partition, PartitionId, Reader
from lanes_spark import JournalSelection, Progress, audit, replay
from tests.memsource.checkers.journals import ended as closed
from tests.memsource.checkers.journals import opened
from tests.spark.rows import ONCE, row
from tests.spark.tables import by_key, noted, noting, positions, write_table

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas:FutureWarning"),
]


@pytest.fixture(scope="module", autouse=True)
def interpreted(spark: Any) -> None:
    """For little data, compiling the plans would take longer than running them."""
    spark.conf.set("spark.sql.codegen.wholeStage", "false")
    spark.conf.set("spark.sql.adaptive.enabled", "false")


TOPIC = "shop/orders"
"""With a stroke of its own, as only a table's topic may have one."""

FAR = 1_000_000
"""Where positions go on, far behind the first ones."""


def at(number: int) -> tuple[int, int]:
    """Return the partition and position of row ``number``; half of the rows are far after the others."""
    return number % 3, number // 3 * 2 + (FAR if number >= 300 else 0)


def owned(topic: str, number: int, assignment: int, incarnation: str = "") -> Partition:
    owner = Partition(PartitionId(topic, number), cast(Reader, None), incarnation=incarnation)
    owner.assignment = assignment
    return owner


def message(number: int, owners: list[Partition]) -> Message:
    partition, position = at(number)
    return Message(owners[partition], position, b"k", 10, None, None)


class Expected:
    """The expected selection of a journal, from a naive loop over its rows."""

    def __init__(self) -> None:
        self.seen: set[int] = set()
        self.finished: set[int] = set()
        self.dead: set[int] = set()
        self.given_up: set[int] = set()
        self.committed = [0, 0, 0]

    def of(self, what: str) -> list[tuple[int, int]]:
        open_ = {one for one in self.seen - self.finished if at(one)[1] >= self.committed[at(one)[0]]}
        found = {"dead_lettered": self.dead, "unfinished": open_, "abandoned": open_ & self.given_up}[what]
        return sorted(map(at, found))


def write_run(folder: Path, member: str, random: Random, expected: Expected, *, whole: bool = True) -> None:
    """Write a run with random events for 400 of 600 messages."""
    journal, history = opened(folder, member=member, rotate_after=None)
    assignment = random.randrange(1, 9)
    owners, others = ([owned(topic, number, assignment) for number in range(3)] for topic in (TOPIC, "other"))
    for owner in owners:
        history.assigned(owner, 2.0)
    lost = random.randrange(3)
    numbers = sorted(random.sample(range(600), 400))
    for step, number in enumerate(numbers):
        if step == 300:
            history.lost(owners[lost], 2.0)
        one = message(number, owners)
        late = step >= 300 and number % 3 == lost
        if not late:
            history.delivered([one], 2.0)
        history.started(one, 2.0)
        expected.seen.add(number)
        fate = random.choice(["ended", "ended", "acked", "failed", "letter", "archived", "abandoned", "blocked", "cut"])
        if fate in ("ended", "acked"):
            history.ended(one, "ok", 2.0)
            if not late:
                expected.finished.add(number)
        if fate == "acked" and not late:
            history.acks([one], 2.0)
        if fate == "failed":
            history.ended(one, "error", 2.0, ValueError())
        if fate == "letter":
            history.dlq_sent(one, 2.0)
            if number % 2:
                history.dlq_confirmed(one, 2.0)
                expected.dead.add(number)
                if not late:
                    expected.finished.add(number)
        if fate == "archived":
            history.archived(one, 2.0)
            expected.dead.add(number)
        if fate == "abandoned":
            history.abandoned([one], 2.0)
            expected.given_up.add(number)
        if fate == "blocked":
            history.blocked(one, 2.0)
            expected.given_up.add(number)
        history.delivered([message(number, others)], 2.0)
    for owner in owners:
        floor = random.randrange(60)
        history.commit_sent(owner, 150, 0, 2.0)
        history.commit_ok(owner, floor, 2.0)
        number = owner.id.number
        expected.committed[number] = max(expected.committed[number], floor)
    closed(journal, history)
    if not whole:
        [file] = folder.glob(f"{member}-*.parquet")
        table = pq.read_table(file)
        pq.write_table(table.slice(0, table.num_rows - 1), file)


@pytest.fixture
def written(tmp_path: Path) -> Expected:
    expected, random = Expected(), Random(7)
    for run in range(3):
        write_run(tmp_path / "journal", f"m-{run}", random, expected)
    return expected


def table_of(tmp_path: Path, count: int = 600) -> Any:
    messages = [row(number) | {"offset": at(number)[1]} for number in range(count)]
    table = write_table(tmp_path / "table", [messages[start::4][::-1] for start in range(4)])
    return type(table)(path=table.path, topic=TOPIC)


def test_a_journal_selects_the_same_positions_as_a_naive_loop(spark: Any, tmp_path: Path, written: Expected) -> None:
    table, path = table_of(tmp_path), str(tmp_path / "journal")
    for of in ("dead_lettered", "unfinished", "abandoned"):
        wanted = written.of(of)
        assert 20 < len(wanted) < 400
        chosen = JournalSelection(path=path, of=of).choose(spark, TOPIC, None)
        found = sorted((one["partition"], one["offset"]) for one in chosen.positions.collect())
        assert found == wanted, of
        assert (chosen.facts.positions, chosen.facts.runs, chosen.facts.doubts) == (len(wanted), 3, ())
        assert all(len(islands) == 2 for islands in chosen.islands.values())
        chosen.close()
    report = replay(
        spark, table, noting(tmp_path / "seen"), only=JournalSelection(path=path, of="unfinished"), partitions=[0, 2]
    )
    wanted = [one for one in written.of("unfinished") if one[0] != 1]
    assert positions(noted(tmp_path / "seen")) == wanted
    assert all(found == sorted(found) for found in by_key(noted(tmp_path / "seen")).values())
    assert (report.delivered, report.skipped, report.missing) == (len(wanted), 600 - len(wanted), 0)
    assert report.journal is not None
    assert report.journal.positions == len(written.of("unfinished"))


def test_a_selection_is_fixed_at_the_start_of_its_checkpoint(spark: Any, tmp_path: Path, written: Expected) -> None:
    table, mended = table_of(tmp_path), str(tmp_path / "mended")
    wanted = written.of("dead_lettered")

    def fail(one: Any) -> None:
        import os

        if one.position > FAR and not os.path.exists(mended):
            raise ValueError("the database is away")

    told: list[Progress] = []
    more: dict[str, Any] = {
        "settings": ONCE,
        "checkpoint": str(tmp_path / "checkpoint"),
        "rows_per_batch": 400,
        "only": JournalSelection(path=[str(tmp_path / "journal")], of="dead_lettered"),
        "progress": told.append,
    }
    with pytest.raises(lanes.HandlerHalted, match="the database is away"):
        replay(spark, table, noting(tmp_path / "first", fail), **more)
    near = [one for one in wanted if one[1] < FAR]
    assert [one for one in positions(noted(tmp_path / "first")) if one[1] < FAR] == near
    # Messages that become dead letters from now on belong to another replay.
    (tmp_path / "mended").touch()
    write_run(tmp_path / "journal", "m-9", Random(9), written)
    assert written.of("dead_lettered") != wanted
    told.clear()
    report = replay(spark, table, noting(tmp_path / "again", fail), **more)
    assert positions(noted(tmp_path / "again")) == [one for one in wanted if one[1] > FAR]
    # The positions between the two ranges were not read, which would have taken thousands of batches.
    assert (report.batches, report.missing) == (2, 0)
    assert (told[-1].left, told[-1].positions < 3_000) == (0, True)
    assert replay(spark, table, noting(tmp_path / "nothing"), **more).batches == 0
    for only in (None, JournalSelection(path=str(tmp_path / "journal"), of="unfinished")):
        with pytest.raises(lanes.SourceError, match="the checkpoint belongs to another replay"):
            replay(spark, table, noting(tmp_path / "nothing"), **{**more, "only": only})
    assert not (tmp_path / "nothing").exists()


def test_missing_rows_of_a_journal_are_reported(
    spark: Any, tmp_path: Path, written: Expected, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "journal"
    only = JournalSelection(path=str(folder), of="dead_lettered", topic=TOPIC)
    # Missing are the last rows of a run, rows in the middle, and a file of another run. A further file is incomplete.
    write_run(folder, "m-8", Random(8), written, whole=False)
    (folder / ".m-7-0.parquet.tmp").write_bytes(b"PAR1")
    for member, cut in (("m-1", slice(100, 200)), ("m-2", slice(0, 50))):
        [file] = folder.glob(f"{member}-*.parquet")
        found = pq.read_table(file)
        kept = [number for number in range(found.num_rows) if number not in range(cut.start, cut.stop)]
        pq.write_table(found.take(kept), file)
    journal, history = opened(folder, member="m-6", rotate_after=None)
    history._n += 5
    history._row("dropped", ',"count":5', 3.0)
    history._n -= 1
    closed(journal, history)
    count = len(written.of("dead_lettered"))
    report = replay(spark, table_of(tmp_path, 450), noting(tmp_path / "seen"), only=only)
    assert report.journal is not None
    assert report.journal.doubts == (
        "1 run(s) have no end, for example a run of m-8: their last rows may be missing",
        "1 run(s) have dropped 5 rows, for example a run of m-6",
        "2 run(s) lack 150 rows in between, for example a run of m-1: files are missing",
        "1 run(s) have no begin, for example a run of m-2: files are missing",
        "1 incomplete file(s) (.tmp) were not read",
    )
    assert all(f"the journal may be incomplete ({doubt});" in caplog.text for doubt in report.journal.doubts)
    assert all(doubt in str(report.plan) for doubt in report.journal.doubts)
    # The table ends before the journal does.
    assert report.missing == report.journal.positions - report.delivered > 0
    assert f"the source lacks {report.missing} of the positions" in caplog.text
    assert report.journal.positions <= count


def test_a_journal_of_another_topic_is_refused(spark: Any, tmp_path: Path, written: Expected) -> None:
    table, folder = table_of(tmp_path), tmp_path / "journal"

    def refused(match: str, kind: Any = lanes.ConfigError, **more: Any) -> None:
        only = JournalSelection(**{"path": str(folder), "of": "unfinished", **more})
        with pytest.raises(kind, match=match):
            replay(spark, table, noting(tmp_path / "nothing"), only=only)

    refused("has no rows of 'order', but of 'other', 'shop/orders': set topic=", topic="order")
    refused("has no rows of 'shop'", topic="shop")
    refused("PATH_NOT_FOUND", lanes.SourceError, path=str(tmp_path / "nowhere"))
    refused("its column run, of type string, is missing", path=str(tmp_path / "table"))
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / ".m-7-0.parquet.tmp").touch()
    refused("has no complete file of a journal, only 1 incomplete files", path=str(tmp_path / "empty"))
    for incarnation in ("a+/", "b"):
        journal, history = opened(folder, member=f"n-{len(incarnation)}", rotate_after=None)
        history.assigned(owned(TOPIC, 1, 1, incarnation), 2.0)
        closed(journal, history)
        if incarnation == "b":
            break
        # Two topics may have the same name.
        only = JournalSelection(path=str(folder), of="unfinished")
        with pytest.raises(
            lanes.SourceError, match=r"the journal is of a former shop/orders, .*set topic='shop/orders' of "
        ):
            only.choose(spark, TOPIC, None, "b")
        for same, now in ((only, "a-_"), (replace(only, topic=TOPIC), "b"), (only, "")):
            same.choose(spark, TOPIC, None, now).close()
    refused("shop/orders/1 was recreated 1 time.*only the files of runs after the last", lanes.SourceError)
    for earlier in ("a-old", "z-old"):
        # Spark reads the columns of all files from one file, which it chooses by name.
        mixed = tmp_path / earlier
        write_run(mixed, earlier, Random(1), Expected())
        [old] = mixed.glob("*.parquet")
        rows = pq.read_table(old).drop_columns(["epoch"])
        pq.write_table(rows.rename_columns({"assignment": "epoch"}), old)
        said = rf"{old.name} was written by an earlier lanes, whose rows cannot be judged: remove the files of that run"
        refused(said, path=str(mixed))
        write_run(mixed, "m-new", Random(1), Expected())
        refused(said, path=str(mixed))
        with pytest.raises(lanes.ConfigError, match=said):
            audit(spark, str(mixed))
    assert not (tmp_path / "nothing").exists()
    wrong: dict[str, Any]
    for wrong in ({"of": "lost"}, {"path": []}, {"path": ""}, {"topic": ""}):
        with pytest.raises(lanes.ConfigError):
            JournalSelection(**{"path": "p", "of": "unfinished", **wrong})  # type: ignore[arg-type]
