"""The plan of a replay: the selected positions, and their division into batches. The plan is pure, so no Spark runs."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pytest
from hypothesis import given
from hypothesis import strategies as st

import lanes
from lanes.core.ring import slot
from lanes.errors import ConfigError, SourceError
from lanes_spark import ParquetTable
from lanes_spark.driver.selection import Selection, select_slots
from lanes_spark.plan import CHECKED, Eras, Plan, check_conf, era_column, make_plan
from lanes_spark.positions import Span, check_kept, check_start, next_positions


def plan(**more: Any) -> Plan:
    return make_plan(**{"order": "key", "keyless": "any", "cores": 8, "partitions": 12, **more})


def test_the_rows_of_a_key_are_in_one_task_sorted_by_position() -> None:
    made = plan()
    assert (made.kind, made.tasks, made.sort) == ("reshard", 32, ("offset", "partition"))
    assert made.bucket is not None
    assert "crc32(key)" in made.bucket
    assert "WHEN key IS NULL THEN CAST(pmod(hash(partition, offset)" in made.bucket
    assert "4 for each of 8 cores" in str(made)
    assert "have no order" in str(made)
    assert "sorted by position, and not by key" in str(made)


def test_a_task_that_reads_whole_partitions_needs_no_shuffle() -> None:
    made = plan(aligned=True)
    assert (made.kind, made.tasks, made.bucket, made.sort) == ("aligned", None, None, ())
    assert "neither a shuffle nor a sort" in str(made)


def test_the_plan_names_the_reason_for_the_number_of_tasks() -> None:
    assert "32 tasks: 4 for each of 8 cores" in str(plan())
    assert "32 tasks: 4 for each of 8 cores" in str(plan(order="partition", partitions=40))
    assert "5 tasks: tasks=5" in str(plan(order="partition", tasks=5))
    for one, number in ((plan(order="partition"), 12), (plan(order="serial", partitions=1), 1)):
        assert f"{number} tasks: the number of selected partitions, because further tasks would get no rows" in str(one)
    assert "12 tasks: the number of selected partitions" in str(plan(order="partition", tasks=50))


def test_each_order_setting_has_its_own_plan() -> None:
    assert (plan(order="partition").bucket, plan(order="partition").tasks) == ("partition", 12)
    assert (plan(order="serial", partitions=1).bucket, plan(order="serial", partitions=1).tasks) == ("partition", 1)
    assert (plan(order="none").kind, plan(order="none").bucket) == ("as read", None)
    in_lane = plan(keyless="one_lane").bucket
    assert in_lane is not None
    assert "WHEN key IS NULL THEN CAST(partition AS INT)" in in_lane
    assert plan(tasks=5).tasks == 5


def test_the_rows_of_a_task_are_sorted_by_era_first() -> None:
    made = plan(eras=[{0: 5}])
    assert made.sort == ("era", "offset", "partition")
    assert "2 eras" in str(made)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"order": "serial"}, 'order="serial" handles one partition, and 12 partitions are selected'),
        ({"aligned": True, "eras": [{0: 5}]}, "aligned=True with eras"),
        ({"aligned": True, "tasks": 5}, "tasks=5 with aligned=True"),
        ({"tasks": 0}, "tasks=0"),
        ({"tasks": True}, "tasks=True"),
        ({"eras": [{0: -1}]}, r"eras\[0\] has 0: -1"),
        ({"eras": [{0: 5, 1: 5}, {0: 9}]}, r"eras\[1\] lacks partition 1"),
        ({"eras": [{0: 5}, {0: 4, 1: 1}]}, r"eras\[1\] begins before eras\[0\] in partition 0"),
    ],
)
def test_a_plan_that_loses_the_order_is_refused(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        plan(**wrong)


def test_settings_of_spark_that_break_promises_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"spark\.speculation=true with"):
        check_conf({"spark.speculation": "true"}, "unfenced")
    check_conf({"spark.speculation": "true"}, "fenced")
    check_conf({"spark.speculation": "true"}, "none")
    check_conf(dict.fromkeys(CHECKED, "false"), "unfenced")
    check_conf(dict.fromkeys(CHECKED), "unfenced")
    for name in CHECKED[2:]:
        with pytest.raises(ConfigError, match=f"{name}=true"):
            check_conf({name: " TRUE "}, "none")
    with pytest.raises(ConfigError, match="effects='some' is unknown"):
        check_conf({}, "some")  # type: ignore[arg-type]


# --- eras


def era_of(eras: Eras, partition: int, position: int) -> int:
    """The era of a row, counted naively: the number of changes at or below its position."""
    return sum(partition not in era or position >= era[partition] for era in eras)


@st.composite
def some_eras(draw: st.DrawFn) -> list[dict[int, int]]:
    eras: list[dict[int, int]] = []
    partitions = 0
    positions: dict[int, int] = {}
    for _ in range(draw(st.integers(0, 3))):
        partitions += draw(st.integers(1, 2))
        positions = {
            partition: positions.get(partition, 0) + draw(st.integers(0, 10)) for partition in range(partitions)
        }
        eras.append(positions)
    return eras


@given(some_eras(), st.integers(0, 7), st.integers(0, 40))
def test_the_sql_expression_and_the_python_function_give_a_row_the_same_era(
    eras: Eras, partition: int, position: int
) -> None:
    column = era_column(eras)
    if column is None:
        assert list(eras) == []
        return
    # Any dialect in which offset is a keyword of SQL serves this test.
    column = column.replace("offset", "position")
    database = sqlite3.connect(":memory:")
    try:
        (found,) = database.execute(
            f"SELECT {column} FROM (SELECT ? AS partition, ? AS position)", (partition, position)
        ).fetchone()
    finally:
        database.close()
    assert found == era_of(eras, partition, position)


# --- batches


SPANS = st.dictionaries(
    st.integers(0, 6), st.tuples(st.integers(0, 20), st.integers(1, 40)).map(lambda one: (one[0], sum(one))), max_size=5
)


@given(SPANS, st.integers(1, 50), some_eras())
def test_batches_cover_everything_once_in_order_and_below_the_cap(
    spans: Mapping[int, Span], cap: int, eras: Eras
) -> None:
    at = {partition: first for partition, (first, _) in spans.items()}
    era = 0
    while (after := next_positions(at, spans, cap, eras)) != at:
        assert after.keys() == spans.keys()
        taken = [(partition, position) for partition in at for position in range(at[partition], after[partition])]
        assert all(at[partition] <= after[partition] for partition in at)
        assert 0 < len(taken) <= cap
        found = {era_of(eras, *one) for one in taken}
        assert len(found) == 1
        assert min(found) >= era
        era = min(found)
        at = after
    assert at == {partition: end for partition, (_, end) in spans.items()}


@given(SPANS)
def test_a_replay_without_a_limit_of_rows_is_one_batch(spans: Mapping[int, Span]) -> None:
    ends = {partition: end for partition, (_, end) in spans.items()}
    assert next_positions({}, spans, None) == ends


def test_a_batch_takes_from_each_partition_a_share_of_its_rows() -> None:
    first = next_positions({}, {0: (0, 900), 1: (0, 100)}, 100)
    assert first == {0: 90, 1: 10}


@pytest.mark.parametrize(
    ("start", "named"),
    [
        ({0: 10}, None),
        ({0: 20, 1: 0}, None),
        ({0: 9}, "orders/0: positions 9 … 9 are unread"),
        ({0: 21}, "orders/0: the replay was at position 21, but the source ends at 20"),
        ({2: 3}, "orders/2: the replay continues at position 3, but the source has lost that partition"),
    ],
)
def test_deleted_rows_are_named(start: dict[int, int], named: str | None) -> None:
    spans = {0: (10, 20), 1: (0, 5)}
    if named is None:
        check_start("orders", start, spans)
    else:
        with pytest.raises(SourceError, match=named):
            check_start("orders", start, spans)


def test_a_deleted_start_is_named() -> None:
    spans = {0: (10, 20), 1: (0, 5)}
    check_kept("orders", {}, spans)
    check_kept("orders", {0: 10, 1: 0}, spans)
    with pytest.raises(
        SourceError,
        match=(r"orders/0: positions 4 … 9 are lost in the source, and from_ selects these positions; begin at 10"),
    ):
        check_kept("orders", {0: 4, 1: 0}, spans)
    assert Selection.of(from_={0: 4, 2: 9}).starts(spans) == {0: 4}
    assert Selection.of(from_=3, partitions=[1]).starts(spans) == {1: 3}
    assert Selection.of(from_=datetime.now(UTC)).starts(spans) == {}


# --- selection


def test_a_selection_narrows_the_ranges_of_the_source() -> None:
    assert Selection.of().place(3, (5, 9)) == (5, 9)
    assert Selection.of(partitions=[1, 2]).place(3, (5, 9)) is None
    assert Selection.of(partitions=range(4)).place(3, (5, 9)) == (5, 9)
    assert Selection.of(from_=7, to={3: 8}).place(3, (5, 9)) == (7, 8)
    assert Selection.of(from_=7, to={3: 8}).place(4, (5, 9)) == (7, 9)
    assert Selection.of(from_=9).place(3, (5, 9)) == (9, 9)
    assert Selection.of(to=4).place(3, (5, 9)) == (4, 4)
    assert Selection.of(partitions=[1]).place(3, (5, 9)) is None
    assert Selection.of(keys=["a", b"a", 1]).keys == (b"\x01" + bytes(15), b"a")
    now = datetime.now(UTC)
    assert Selection.of(from_=now).place(3, (5, 9)) == (5, 9)
    assert Selection.of(from_=now).digest() != Selection.of(from_=now + timedelta(microseconds=1)).digest()
    assert Selection.of(slots=[1, 2]).digest() == Selection.of(slots=range(1, 3)).digest()


def test_the_repr_of_a_plan_shows_no_key() -> None:
    assert "customer" not in repr(Selection.of(keys=["customer-42"]))


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"keys": "customer"}, r"write keys=\[key\]"),
        ({"keys": []}, "keys has 0"),
        ({"keys": [1.5]}, "keys: a key must be bytes, str or int"),
        ({"slots": [65_536]}, "slots holds 65536: "),
        ({"slots": []}, "slots is empty"),
        ({"partitions": 3}, "partitions=3: give several"),
        ({"partitions": [-1]}, "partitions holds -1"),
        ({"from_": datetime.fromisoformat("2026-01-01T00:00:00")}, "from_=2026-01-01T00:00:00 has no time zone"),
        ({"to": -1}, "to=-1"),
        ({"to": "yesterday"}, "to='yesterday'"),
    ],
)
def test_an_invalid_selection_is_refused(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Selection.of(**wrong)


@given(st.lists(st.none() | st.binary(max_size=4), max_size=20), st.frozensets(st.integers(0, 65_535)))
def test_selected_slots_equal_the_slots_of_lanes_ring(keys: list[bytes | None], more: frozenset[int]) -> None:
    known = [key for key in keys if key is not None]
    slots = more | {slot(key) for key in known[::2]}
    batch = pa.RecordBatch.from_pydict(
        {"key": pa.array(keys, pa.binary()), "n": pa.array(range(len(keys)), pa.int64())}
    )
    (left,) = select_slots([batch], slots)
    assert left.column("n").to_pylist() == [
        number for number, key in enumerate(keys) if key is not None and slot(key) in slots
    ]


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"columns": {"offst": "o"}}, "columns has 'offst'"),
        ({"topic": ""}, "topic is empty"),
        ({"eras": [{0: -1}]}, r"eras\[0\]"),
    ],
)
def test_an_invalid_table_is_refused(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(lanes.ConfigError, match=named):
        ParquetTable(**{"path": "orders", "topic": "orders", **wrong})
