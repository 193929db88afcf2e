"""A checkpoint on a real Spark owns its results, its selection from a journal, and its unfinished batch."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest

import lanes
from lanes_spark import JournalSelection, Progress, replay
from lanes_spark.checkpoint import query_of
from lanes_spark.driver.results_folder import ResultsFolder
from tests.memsource.checkers.journals import ended, opened
from tests.spark.rows import ONCE, rows
from tests.spark.tables import noted, noting, positions, write_table
from tests.spark.test_journal_selection import message, owned

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas:FutureWarning"),
]

COUNT = 300
RESULTS = pa.schema([("partition", pa.int64()), ("position", pa.int64())])


@pytest.fixture(scope="module", autouse=True)
def interpreted(spark: Any) -> None:
    """For little data, compiling the plans would take longer than running them."""
    spark.conf.set("spark.sql.codegen.wholeStage", "false")


def everything() -> list[tuple[int, int]]:
    return sorted((one["partition"], one["offset"]) for one in rows(COUNT))


def table_of(tmp_path: Path) -> Any:
    return write_table(tmp_path / "table", [rows(COUNT)[start::4][::-1] for start in (2, 0, 3, 1)])


def stored(path: Path) -> list[tuple[int, int]]:
    table = pq.read_table(path)
    return sorted(zip(table["partition"].to_pylist(), table["position"].to_pylist(), strict=True))


def once_there(path: Path, error: BaseException) -> Callable[[Any], None]:
    """Return a handler that raises the error until the file exists."""

    def call(_: object) -> None:
        if not path.exists():
            raise error

    return call


class Gone(ConnectionError):
    """An error whose base class is also a base of Spark's own errors."""


# --- results


def test_a_folder_has_the_results_of_one_checkpoint(spark: Any, tmp_path: Path) -> None:
    table, seen, mended = table_of(tmp_path), tmp_path / "seen", tmp_path / "mended"

    def on(checkpoint: str, results: str, handler: Any = None, **more: Any) -> Any:
        return replay(
            spark,
            table,
            noting(seen) if handler is None else handler,
            settings=ONCE,
            results=RESULTS,
            results_to=str(tmp_path / results),
            checkpoint=str(tmp_path / checkpoint),
            rows_per_batch=200,
            tasks=2,
            **more,
        )

    # Killed before the first result, and after the results of the first batch but before Spark recorded that batch.
    gone = Gone("the terminal is gone")
    with pytest.raises(lanes.HandlerHalted):
        on("one", "results", noting(tmp_path / "failed", once_there(mended, gone)))
    with pytest.raises(Gone):
        on("one", "results", progress=once_there(mended, gone))
    first = stored(tmp_path / "results")
    assert COUNT // 4 < len(first) < COUNT // 2
    # Another checkpoint would use the same batch numbers for other rows: the results stay unchanged, and no message is
    # handled.
    before = noted(seen)
    with pytest.raises(
        lanes.ConfigError, match=r"results_to='.*/results': .* another checkpoint, begun at .*/one, and "
    ) as no:
        on("two", "results", partitions=[0])
    assert "name a new folder, or continue with that checkpoint" in str(no.value)
    assert (noted(seen), stored(tmp_path / "results")) == (before, first)
    assert on("one", "results").batches == 3
    assert stored(tmp_path / "results") == everything()
    assert (
        sorted((row["partition"], row["position"]) for row in spark.read.parquet(str(tmp_path / "results")).collect())
        == everything()
    )
    # A checkpoint that starts again is another checkpoint, at any path.
    shutil.rmtree(tmp_path / "one")
    with pytest.raises(lanes.ConfigError, match="another checkpoint, begun at"):
        on("one", "results")
    assert on("two", "other", partitions=[0]).delivered == COUNT // 3
    # A replay that is refused for another reason claims no folder.
    with pytest.raises(lanes.HandlerHalted):
        replay(
            spark,
            table,
            noting(tmp_path / "failed", once_there(tmp_path / "never", gone)),
            settings=ONCE,
            checkpoint=str(tmp_path / "three"),
            tasks=2,
        )
    with pytest.raises(lanes.SourceError, match="belongs to another replay"):
        on("three", "third", partitions=[1])
    assert not (tmp_path / "third").exists()


def test_results_that_no_checkpoint_has_written_are_left_alone(spark: Any, tmp_path: Path) -> None:
    table, results = table_of(tmp_path), tmp_path / "results"
    more: dict[str, Any] = {"results": RESULTS, "results_to": str(results), "tasks": 2}
    replay(spark, table, noting(tmp_path / "seen"), **more)
    with pytest.raises(
        lanes.ConfigError,
        match=r"results_to='.*': the folder has files that this checkpoint has not written, .*/part-0.*parquet",
    ):
        replay(spark, table, noting(tmp_path / "nothing"), **more, checkpoint=str(tmp_path / "one"))
    assert stored(results) == everything()
    assert not (tmp_path / "nothing").exists()
    # An empty folder counts as a missing folder.
    shutil.rmtree(results)
    results.mkdir()
    (results / "_SUCCESS").touch()
    replay(spark, table, noting(tmp_path / "seen"), **more, checkpoint=str(tmp_path / "one"))
    assert stored(results) == everything()
    # The note must name its owner.
    [note] = (results / "_lanes" / "checkpoint").glob("part-*")
    note.write_text("{}\n")
    (note.parent / f".{note.name}.crc").unlink()
    with pytest.raises(lanes.ConfigError, match="owner is unknown"):
        replay(spark, table, noting(tmp_path / "nothing"), **more, checkpoint=str(tmp_path / "one"))
    (tmp_path / "one" / ".metadata.crc").unlink()
    (tmp_path / "one" / "metadata").write_text("{}\n")
    note.unlink()
    with pytest.raises(lanes.ConfigError, match=r"has lost the results of the checkpoint .*: restore the folder"):
        replay(spark, table, noting(tmp_path / "nothing"), **more, checkpoint=str(tmp_path / "one"))


def test_a_checkpoint_has_one_folder_of_results(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table, seen = write_table(tmp_path / "table", [rows(60)]), tmp_path / "seen"

    def on(checkpoint: str, results: str | None, **more: Any) -> Any:
        into = {} if results is None else {"results": RESULTS, "results_to": str(tmp_path / results)}
        return replay(
            spark,
            table,
            noting(seen),
            settings=ONCE,
            checkpoint=str(tmp_path / checkpoint),
            rows_per_batch=30,
            tasks=1,
            **into,
            **more,
        )

    def stop(at: Progress) -> None:
        # One batch is recorded, and the next batch is not.
        if at.batches == 2:
            raise Gone("the terminal is gone")

    def refused(checkpoint: str, results: str | None, why: str) -> None:
        before = noted(seen)
        with pytest.raises(lanes.ConfigError, match=why):
            on(checkpoint, results)
        assert noted(seen) == before
        assert results is None or not (tmp_path / results).exists()

    # Killed between the note in the folder and the note in the checkpoint: without results, another checkpoint may use
    # the folder.
    write = ResultsFolder._write

    def killed(self: ResultsFolder, path: str, note: Any) -> None:
        if not path.endswith("/_lanes/checkpoint"):
            raise lanes.SourceError("killed")
        write(self, path, note)

    for results in ("first", "first", "a"):
        with monkeypatch.context() as patched:
            patched.setattr(ResultsFolder, "_write", killed)
            with pytest.raises(lanes.SourceError, match="killed"):
                on("one", results)
    assert not seen.exists()
    with pytest.raises(Gone):
        on("one", "a", progress=stop)
    assert len(stored(tmp_path / "a")) == 30
    refused(
        "one", "b", r"results_to='.*/b': the checkpoint .*/one was begun with results_to='.*/a', .* continue with res"
    )
    refused("one", None, r"results_to=None: the checkpoint .*/one was begun with results_to='.*/a'")
    with pytest.raises(lanes.ConfigError, match=r"was begun with results_to='.*/a'"):
        on("one", "first")
    # The folder counts, not its name.
    (tmp_path / "a").rename(tmp_path / "moved")
    refused(
        "one", "a", r"results_to='.*/a': the folder has lost the results of the checkpoint .*/one: restore the folder"
    )
    on("one", "moved")
    assert stored(tmp_path / "moved") == sorted((one["partition"], one["offset"]) for one in rows(60))
    # The state of an earlier version, which wrote no note into the checkpoint.
    shutil.rmtree(tmp_path / "one" / "results")
    refused("one", "b", r"the checkpoint .*/one was begun without results_to, or with another folder")
    assert on("one", "moved").batches == 0
    # A checkpoint that started without a folder for results.
    with pytest.raises(Gone):
        on("two", None, progress=stop)
    refused("two", "b", r"the checkpoint .*/two was begun without results_to, or with another folder")


def test_a_name_that_looks_like_a_pattern_is_read_as_a_name(spark: Any, tmp_path: Path) -> None:
    table, names = write_table(tmp_path / "table", [rows(60)]), r"c[1]?*{x,y}\z"

    def on(checkpoint: str, results: str, **more: Any) -> Any:
        return replay(
            spark,
            table,
            noting(tmp_path / "seen"),
            settings=ONCE,
            results=RESULTS,
            results_to=str(tmp_path / results),
            checkpoint=str(tmp_path / checkpoint),
            rows_per_batch=30,
            tasks=1,
            **more,
        )

    def stop(at: Progress) -> None:
        if at.batches:
            raise Gone("the terminal is gone")

    # As a pattern, the path would match this folder.
    (tmp_path / "r1").mkdir()
    for checkpoint, results in ((names, "plain"), ("other", "r[1]")):
        with pytest.raises(Gone):
            on(checkpoint, results, progress=stop)
        on(checkpoint, results)
        assert len(stored(tmp_path / results)) == 60
    with pytest.raises(lanes.ConfigError, match="the folder is for the results of another checkpoint"):
        on("two", "r[1]", partitions=[0])
    folder = str(tmp_path / names)
    query = json.loads((tmp_path / names / "metadata").read_text())["id"]
    assert query_of(spark, folder) == query
    # A refused replay writes no note.
    with pytest.raises(lanes.SourceError, match=r"checkpoint='.*/lost': .*/lost/metadata, .* is missing"):
        ResultsFolder(spark, str(tmp_path / "new"), str(tmp_path / "lost")).take()
    assert not (tmp_path / "new").exists()


def test_a_checkpoint_within_the_folder_of_results_is_refused(spark: Any, tmp_path: Path) -> None:
    def check(checkpoint: Path) -> None:
        checkpoint.mkdir(parents=True, exist_ok=True)
        (checkpoint / "lanes.lock").touch()
        ResultsFolder(spark, f"{tmp_path}/out", str(checkpoint)).check()

    for inside in (tmp_path / "out" / "deep" / "checkpoint", tmp_path / "out"):
        with pytest.raises(
            lanes.ConfigError,
            match=r"results_to='.*/out': the checkpoint .* is inside this folder, .* name a checkpoint outside",
        ):
            check(inside)
    # Readers of a table skip folders with these names, and the name `outside` only begins like `out`.
    shutil.rmtree(tmp_path / "out")
    for apart in ("out/_checkpoint", "out/.state/checkpoint", "outside"):
        check(tmp_path / apart)


# --- what progress= raises


class Stop(BaseException):
    """An exception that is no `Exception`, like KeyboardInterrupt and SystemExit."""


@pytest.mark.parametrize("kind", [Gone, Stop])
@pytest.mark.parametrize("checkpoint", [None, "checkpoint"])
def test_an_error_of_progress_is_raised_unchanged(
    spark: Any, tmp_path: Path, checkpoint: str | None, kind: type[BaseException]
) -> None:
    table, mended, error = table_of(tmp_path), tmp_path / "mended", kind("the terminal is gone")
    more: dict[str, Any] = {"checkpoint": checkpoint and str(tmp_path / checkpoint), "rows_per_batch": 150, "tasks": 2}

    def tell(at: Progress) -> None:
        # After the second batch, if there are two.
        if at.batches == (2 if checkpoint else 1) and not mended.exists():
            raise error

    with pytest.raises(kind) as told:
        replay(spark, table, noting(tmp_path / "first"), progress=tell, **more)
    assert told.value is error
    assert error.__cause__ is None
    # The continued replay leaves out no message: it handles the unrecorded batch again.
    mended.touch()
    replay(spark, table, noting(tmp_path / "again"), progress=tell, **more)
    first, again = positions(noted(tmp_path / "first")), positions(noted(tmp_path / "again"))
    assert again == (everything() if checkpoint is None else [one for one in everything() if one[1] >= 50])
    assert set(first) | set(again) == set(everything())


def test_an_error_of_progress_within_a_batch_ends_the_replay_after_the_batch(spark: Any, tmp_path: Path) -> None:
    table, told = table_of(tmp_path), tmp_path / "told"

    def wait(_: object) -> None:
        import time

        while not told.exists():
            time.sleep(0.01)

    def tell(at: Progress) -> None:
        told.touch()
        raise Gone(at.batches)

    more: dict[str, Any] = {"checkpoint": str(tmp_path / "checkpoint"), "progress": tell, "tasks": 2}
    with pytest.raises(Gone) as gone:
        replay(spark, table, noting(tmp_path / "seen", wait), **more)
    assert gone.value.args == (0,)
    assert positions(noted(tmp_path / "seen")) == everything()


def test_the_first_error_is_raised_and_the_second_is_logged(
    spark: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told = tmp_path / "told"

    def fail(_: object) -> None:
        import time

        while not told.exists():
            time.sleep(0.01)
        raise ValueError("no such customer")

    def tell(at: Progress) -> None:
        told.touch()
        raise Gone("the terminal is gone")

    with pytest.raises(lanes.HandlerHalted, match="no such customer"):
        replay(spark, table_of(tmp_path), noting(tmp_path / "seen", fail), settings=ONCE, progress=tell, tasks=2)
    assert "progress= raised Gone (the terminal is gone) and is not called again" in caplog.text


# --- what a journal has selected


def test_a_checkpoint_without_its_selection_is_refused(spark: Any, tmp_path: Path) -> None:
    table, folder, checkpoint = table_of(tmp_path), tmp_path / "journal", tmp_path / "checkpoint[1]"

    def letters(member: str, numbers: range) -> None:
        journal, history = opened(folder, member=member, rotate_after=None)
        owners = [owned("orders", number, 1) for number in range(3)]
        for owner in owners:
            history.assigned(owner, 2.0)
        for number in numbers:
            one = message(number, owners)
            history.delivered([one], 2.0)
            history.started(one, 2.0)
            history.dlq_sent(one, 2.0)
            history.dlq_confirmed(one, 2.0)
        ended(journal, history)

    letters("m-1", range(100))
    more: dict[str, Any] = {
        "only": JournalSelection(path=str(folder), of="dead_lettered"),
        "checkpoint": str(checkpoint),
        "tasks": 2,
    }
    assert replay(spark, table, noting(tmp_path / "seen"), **more).delivered == 100
    letters("m-2", range(100, 150))
    for lost, named in (("facts", "has lost its selection: restore"), ("positions", "PATH_NOT_FOUND")):
        (checkpoint / "selected" / lost).rename(tmp_path / lost)
        with pytest.raises(lanes.SourceError, match=named):
            replay(spark, table, noting(tmp_path / "nothing"), **more)
        # The selection stays the same.
        assert not (checkpoint / "selected" / lost).exists()
        (tmp_path / lost).rename(checkpoint / "selected" / lost)
    part = max((checkpoint / "selected" / "positions").glob("part-*"), key=lambda path: pq.read_metadata(path).num_rows)
    part.rename(tmp_path / part.name)
    with pytest.raises(lanes.SourceError, match=r"orders: the checkpoint has \d+ of its 100 selected positions"):
        replay(spark, table, noting(tmp_path / "nothing"), **more)
    (tmp_path / part.name).rename(part)
    # With the complete selection, the replay has nothing left to do.
    assert replay(spark, table, noting(tmp_path / "nothing"), **more).batches == 0
    # A checkpoint that started without a journal stays unchanged.
    whole = str(tmp_path / "whole{1}")
    assert replay(spark, table, noting(tmp_path / "all"), checkpoint=whole).finished == COUNT
    with pytest.raises(lanes.SourceError, match=r"belongs to another replay \(begun without only="):
        replay(spark, table, noting(tmp_path / "nothing"), **{**more, "checkpoint": whole})
    assert not (tmp_path / "whole{1}" / "selected").exists()
    assert not (tmp_path / "nothing").exists()
