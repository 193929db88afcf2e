"""The files that are mutated, the quick tests that must kill their mutants, and the goals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class Target:
    """Files with common tests and a common goal.

    Attributes:
        name: Name in the results.
        files: Patterns of the mutated files, relative to the project.
        tests: Folders and files of the tests. Only tests for ``make test-fast`` run.
        goal: Least score in percent.
        on_postgres: Whether tests on the shared PostgreSQL server run too.
    """

    name: str
    files: tuple[str, ...]
    tests: tuple[str, ...]
    goal: int
    on_postgres: bool = False

    def paths(self) -> list[str]:
        """The mutated files, relative to the project."""
        found = {path for pattern in self.files for path in ROOT.glob(pattern) if path.name != "__init__.py"}
        return sorted(str(path.relative_to(ROOT)) for path in found)


TARGETS: Final = (
    Target("core", ("lanes/core/**/*.py",), ("tests/core",), 95),
    Target("cohort", ("lanes/cohort/*.py",), ("tests/cohort",), 85),
    Target(
        "lanes_kafka",
        # The files that decide about positions, commits, drains, pauses, records and partitions. The others hold
        # settings, texts, the command line and dead letters.
        (
            "adapters/lanes_kafka/bridge.py",
            "adapters/lanes_kafka/client/commits.py",
            "adapters/lanes_kafka/client/group.py",
            "adapters/lanes_kafka/client/intake.py",
            "adapters/lanes_kafka/client/lag.py",
            "adapters/lanes_kafka/client/last_callbacks.py",
            "adapters/lanes_kafka/client/mailbox.py",
            "adapters/lanes_kafka/client/membership.py",
            "adapters/lanes_kafka/client/offsets.py",
            "adapters/lanes_kafka/client/prefetch.py",
            "adapters/lanes_kafka/client/records.py",
            "adapters/lanes_kafka/client/retention.py",
            "adapters/lanes_kafka/client/thread.py",
            "adapters/lanes_kafka/client/topics.py",
            "adapters/lanes_kafka/source.py",
        ),
        ("tests/kafka", "tests/simulated/test_kafka.py"),
        85,
    ),
    Target(
        "lanes_jetstream",
        (
            "adapters/lanes_jetstream/cohort/epoch_consumers.py",
            "adapters/lanes_jetstream/cohort/lease_store.py",
            "adapters/lanes_jetstream/cohort/owned_partition.py",
            "adapters/lanes_jetstream/cohort/source.py",
            "adapters/lanes_jetstream/durable/consumer.py",
            "adapters/lanes_jetstream/durable/source.py",
            "adapters/lanes_jetstream/durable/takeover.py",
            "adapters/lanes_jetstream/wire/acks.py",
            "adapters/lanes_jetstream/wire/pull_requests.py",
        ),
        ("tests/jetstream", "tests/simulated/test_jetstream.py", "tests/simulated/jetstream"),
        85,
    ),
    # The files of lanes_postgres that decide about locks, states, positions, pieces, ranges and visits. The others hold
    # statements of the log, texts, the command line and dead letters.
    Target(
        "postgres_locks",
        (
            "adapters/lanes_postgres/advisory_locks.py",
            "adapters/lanes_postgres/lock_session.py",
            "adapters/lanes_postgres/states.py",
        ),
        (
            "tests/postgres/test_advisory_locks.py",
            "tests/postgres/test_epochs.py",
            "tests/postgres/test_lock_preparation.py",
            "tests/postgres/test_lock_session.py",
            "tests/postgres/test_states.py",
            "tests/simulated/test_postgres.py",
        ),
        85,
        on_postgres=True,
    ),
    Target(
        "postgres_ring",
        (
            "adapters/lanes_postgres/ring/pieces.py",
            "adapters/lanes_postgres/ring/range_map.py",
            "adapters/lanes_postgres/ring/reading.py",
            "adapters/lanes_postgres/ring/shared_calls.py",
            "adapters/lanes_postgres/ring/slots.py",
            "adapters/lanes_postgres/subscription/owned_piece.py",
            "adapters/lanes_postgres/subscription/piece_visitor.py",
        ),
        ("tests/postgres/ring", "tests/simulated/postgres", "tests/simulated/test_ranges.py"),
        85,
        on_postgres=True,
    ),
    Target(
        "postgres_subscription",
        (
            "adapters/lanes_postgres/subscription/owned.py",
            "adapters/lanes_postgres/subscription/source.py",
            "adapters/lanes_postgres/subscription/visitor.py",
            "adapters/lanes_postgres/subscription/visits.py",
        ),
        (
            "tests/postgres/log/test_kept.py",
            "tests/postgres/log/test_over.py",
            "tests/postgres/log/test_owned.py",
            "tests/postgres/log/test_source_calls.py",
            "tests/postgres/log/test_subscriptions.py",
            "tests/postgres/log/test_visitor.py",
            "tests/postgres/log/test_visits.py",
            "tests/postgres/test_setup_errors.py",
            "tests/simulated/postgres",
            "tests/simulated/test_postgres.py",
            "tests/simulated/test_ranges.py",
        ),
        85,
        on_postgres=True,
    ),
)


def chosen(names: Sequence[str]) -> dict[Target, list[str]]:
    """Return the files that the names select, by target.

    Args:
        names: Names of targets, files or folders. Empty: all.

    Raises:
        ValueError: A name selects no mutated file.
    """
    found: dict[Target, list[str]] = {}
    for target in TARGETS:
        files = [file for file in target.paths() if not names or any(_selects(name, target, file) for name in names)]
        if files:
            found[target] = files
    for name in names:
        if not any(_selects(name, target, file) for target, files in found.items() for file in files):
            known = ", ".join(target.name for target in TARGETS)
            raise ValueError(f"{name}: selects no mutated file; name a file or folder of a target, or one of {known}")
    return found


def _selects(name: str, target: Target, file: str) -> bool:
    return name == target.name or Path(file).is_relative_to(name)
