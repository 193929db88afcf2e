"""A replay on several executors keeps the order of each key, in spite of the shuffle between processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lanes_spark import replay
from tests.spark.rows import rows
from tests.spark.tables import by_key, noted, noting, positions, write_table

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas:FutureWarning"),
]


def test_order_within_a_key_is_kept_on_three_executors(cluster: Any, tmp_path: Path) -> None:
    messages = rows(3_000, partitions=4, keys=25)
    table = write_table(tmp_path / "table", [messages[start::6][::-1] for start in range(6)])
    for name, more in (
        ("whole", {}),
        ("batches", {"checkpoint": str(tmp_path / "checkpoint"), "rows_per_batch": 3_000}),
    ):
        report = replay(cluster, table, noting(tmp_path / name), tasks=6, **more)  # type: ignore[call-overload]
        found = noted(tmp_path / name)
        assert positions(found) == sorted((one["partition"], one["offset"]) for one in messages)
        assert all(calls == sorted(calls) for calls in by_key(found).values())
        assert report.finished == 3_000
