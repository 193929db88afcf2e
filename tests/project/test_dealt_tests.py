"""The tests are dealt to the processes of `make test`: long tests first, and the tests of a server to few of them"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from tests.conftest import _dealt, tells_something


def items(name: str, count: int, *, seconds: float = 0.0, fixtures: tuple[str, ...] = (), **params: str) -> list[Any]:
    """Items of one module; ``seconds`` is their timeout, and 0 means that they have no mark of a timeout."""
    mark = SimpleNamespace(args=(seconds,)) if seconds else None
    return [
        SimpleNamespace(
            path=Path(f"test_{name}.py"),
            fixturenames=fixtures,
            callspec=SimpleNamespace(params=params),
            get_closest_marker=lambda _: mark,
        )
        for _ in range(count)
    ]


SHORT = items("short", 80)
LONG = [items(f"long_{number}", 1, seconds=300.0) for number in range(6)]
BROKER = items("a", 3, fixtures=("kafka",)) + items("b", 3, fixtures=("kafka_prepared",)) + items("c", 4, place="kafka")
PRIVATE = items("private", 5, fixtures=("kafka_prepared", "fresh_kafka")) + items("d", 5, place="jetstream")


def parts_of(dealt: list[Any], workers: int) -> list[list[Any]]:
    """The parts of the workers: xdist gives each worker an equal part of what remains."""
    parts, left = [], dealt
    for number in range(workers):
        size = len(left) // (workers - number)
        parts.append(left[:size])
        left = left[size:]
    return parts


@pytest.mark.parametrize("workers", [1, 2, 3, 6])
@pytest.mark.parametrize("fixture", ["postgres", "spark"])
def test_one_part_has_all_tests_of_a_shared_server(fixture: str, workers: int) -> None:
    shared = [item for name in "abc" for item in items(name, 4, fixtures=(fixture, "tmp_path"))]
    shared += items("long", 1, seconds=300.0, fixtures=(fixture,))
    everything = [*SHORT[:40], *shared, *BROKER, *(item for module in LONG for item in module), *SHORT[40:]]
    parts = parts_of(_dealt(everything, workers), workers)
    assert sorted(id(item) for part in parts for item in part) == sorted(map(id, everything))
    (part,) = (part for part in parts if any(item in shared for item in part))
    assert all(item in part for item in shared)
    paths = [item.path for item in part if item in shared]
    assert paths == sorted(paths)


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 6])
def test_a_third_of_the_parts_has_the_tests_of_the_shared_broker(workers: int) -> None:
    everything = [*SHORT[:40], *BROKER, *PRIVATE, *(item for module in LONG for item in module), *SHORT[40:]]
    dealt = _dealt(everything, workers)
    assert sorted(map(id, dealt)) == sorted(map(id, everything))
    parts = parts_of(dealt, workers)
    with_broker = [part for part in parts if any(item in BROKER for item in part)]
    assert with_broker == parts[: -(-workers // 3)]
    short = [*SHORT, *PRIVATE]
    for part in parts:
        first_short = next(number for number, item in enumerate(part) if item in short)
        assert all(item in short for item in part[first_short:])
        assert first_short > 0


@pytest.mark.parametrize(
    ("when", "outcome", "duration", "told"),
    [
        ("setup", "passed", 0.01, False),
        ("teardown", "passed", 0.01, False),
        ("call", "passed", 0.01, True),
        ("setup", "passed", 0.2, True),
        ("setup", "skipped", 0.01, True),
        ("setup", "failed", 0.01, True),
        ("teardown", "failed", 0.01, True),
    ],
)
def test_a_worker_leaves_out_only_quick_fixtures_that_passed(
    when: Literal["setup", "call", "teardown"],
    outcome: Literal["passed", "failed", "skipped"],
    duration: float,
    told: bool,
) -> None:
    place = ("test_x.py", 1, "test_x")
    report = pytest.TestReport("test_x.py::test_x", place, {}, outcome, None, when, duration=duration)
    assert tells_something(report) is told
    report.sections = [("Captured stdout teardown", "bye")]
    assert tells_something(report)
