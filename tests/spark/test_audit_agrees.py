"""An audit has the same verdicts as ``lanes check`` on the same histories, many of which one job audits.

A job does the same work for all its histories, so the histories are divided into groups by the rows that they lack.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random, randrange
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from lanes_spark.audits import judge as audit_judge
from lanes_spark.audits.verdicts import AUDITED
from tests.memsource.checkers.commit_faults import COMMIT_FAULTS
from tests.memsource.checkers.commit_world import segments_of as commit_segments_of
from tests.memsource.checkers.faults import FAULTS
from tests.memsource.checkers.rows import Rows
from tests.memsource.checkers.worlds import segments_of
from tests.spark.histories import MAKERS, audited, differing, disturbed, fresh, plain, scattered, without

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module", autouse=True)
def interpreted(spark: Any) -> None:
    """For little data, compiling the plans would take longer than running them."""
    spark.conf.set("spark.sql.codegen.wholeStage", "false")
    spark.conf.set("spark.sql.adaptive.enabled", "false")
    spark.conf.set("spark.sql.shuffle.partitions", "1")


def drawn(examples: int) -> dict[str, list[Rows]]:
    """Return histories drawn by Hypothesis: legal histories, and histories with up to three disturbances."""
    found: dict[str, list[Rows]] = {}

    @settings(
        max_examples=examples,
        phases=[Phase.generate],
        database=None,
        derandomize=True,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.integers(0, 500), st.sampled_from(MAKERS), st.integers(0, 3), st.integers(0, 2**16))
    def draw(seed: int, make: Callable[[int], list[Rows]], times: int, chance: int) -> None:
        segments, random = make(seed), Random(chance)
        done = [disturbed(segments, random) for _ in range(times)]
        found[f"{make.__module__} {seed} {chance} {done}"] = segments

    draw()
    return found


def planted() -> dict[str, list[Rows]]:
    """Plant each fault in the first two histories that allow the fault."""
    found = {}
    for make, faults in ((segments_of, FAULTS), (commit_segments_of, COMMIT_FAULTS)):
        for fault in faults:
            places = (segments for seed in range(40) if (segments := fault(make(seed))) is not None)
            for number, segments in zip(range(2), places, strict=False):
                found[f"{make.__module__} {fault.__name__} {number}"] = segments
    return found


def strewn(number: int) -> dict[str, list[Rows]]:
    """Return histories of a few random rows."""
    return {f"scattered {seed}": scattered(Random(seed)) for seed in range(number)}


def test_any_history_has_the_verdict_of_lanes_check(spark: Any, tmp_path: Path) -> None:
    histories = drawn(150) | planted() | strewn(700)
    found, _ = audited(spark, histories, tmp_path / "histories")
    differ, statuses = differing(histories, found)
    assert not differ
    # Otherwise the comparison would prove little.
    assert all(statuses[name, status] >= 4 for name in AUDITED for status in ("held", "violated")), statuses


COMMITS = ("commit_sent", "commit_ok", "commit_failed")
Change = Callable[[list[Rows]], list[Rows]]


def strangers(segments: list[Rows]) -> list[Rows]:
    """Return the history with every second process on another machine."""
    return [
        [{**row, "boot": f"boot-{number % 2}"} if row["event"] == "begin" else row for row in rows]
        for number, rows in enumerate(segments)
    ]


GROUPS: Mapping[str, tuple[Change, tuple[str, ...]]] = {
    "all": (lambda segments: segments, ()),
    "no commits": (lambda segments: without(segments, *COMMITS, floors=False), ("passed", "committed")),
    "nothing produced": (lambda segments: without(segments, "produced"), ()),
    "no leases": (lambda segments: without(segments, "leased"), ("behind_leases",)),
    "none of it": (
        lambda segments: without(segments, *COMMITS, "produced", "leased", floors=False),
        ("passed", "committed", "behind_leases"),
    ),
    "of several machines": (strangers, ()),
}
"""What is done to each history, and what an audit of all of them has no use for then."""

OFTEN = ("PerKeyOrder", "NoOverlap", "ExclusiveOwner", "AtLeastOnce")
"""Promises that hundreds of histories by chance are sure to break."""


def unused(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    def called(*_: Any) -> Any:
        raise AssertionError("there is no need of it")

    for name in names:
        monkeypatch.setattr(audit_judge, name, called)


@pytest.mark.parametrize("name", GROUPS)
def test_histories_without_some_rows_have_the_verdict_of_lanes_check(
    name: str, spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, needless = GROUPS[name]
    unused(monkeypatch, *needless)
    # A different seed in each run; `--randomly-seed` repeats a run.
    seed = randrange(2**32)
    histories = {one: change(segments) for one, segments in fresh(seed, 400).items()}
    found, _ = audited(spark, histories, tmp_path / "histories")
    differ, statuses = differing(histories, found)
    assert not differ, f"fresh({seed}, 400)"
    assert all(statuses[one, status] for one in OFTEN for status in ("held", "violated")), (seed, statuses)


def test_sequential_histories_have_the_verdict_of_lanes_check(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unused(monkeypatch, "suspects", "at_least_once", "passed")
    seed = randrange(2**32)
    histories = {str(one): plain(Random(f"{seed} {one}")) for one in range(400)}
    found, _ = audited(spark, histories, tmp_path / "histories")
    differ, statuses = differing(histories, found)
    assert not differ, seed
    assert statuses["ExclusiveOwner", "violated"], (seed, statuses)
