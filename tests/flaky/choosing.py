"""Which tests depend on the machine's time, by rules that a reader can check.

A test is chosen by the first rule that holds. What "its files" import is what is imported anywhere in the test's own
file and in the helpers of `tests/`, `bench/` and `fuzz/` that it imports, and these, and so on. `tests/conftest.py` is
not followed: what it starts is asked for by the name of a fixture. Left out are tests that may take longer than
`LONGEST`, by their own mark: they do much in one run, and the full runs have them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Set
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]

LONGEST: Final = 300.0
"""Seconds that a test may be allowed, to be run again and again."""

FOLLOWED: Final = ("tests.", "bench.", "fuzz.")
NOT_FOLLOWED: Final = ("tests.conftest", "tests.components")
"""The starter imports all of its servers: what is asked of it is named by who asks."""


@dataclass(frozen=True)
class Rule:
    """Fixtures by name; modules and what is in them by dotted name."""

    name: str
    fixtures: frozenset[str]
    imports: frozenset[str]
    coroutines: bool = False

    def __str__(self) -> str:
        ways = ["a coroutine on a real event loop"] if self.coroutines else []
        ways += [f"asks for {', '.join(sorted(self.fixtures))}"] if self.fixtures else []
        ways += [f"its files import {', '.join(sorted(self.imports))}"] if self.imports else []
        return "; or ".join(ways)


RULES: Final = (
    Rule(
        "broker",
        frozenset(
            {
                "nats_server",
                "fresh_nats",
                "kafka",
                "kafka_prepared",
                "fresh_kafka",
                "postgres",
                "fresh_postgres",
                "spark",
            }
        ),
        frozenset(
            {f"tests.components.{name}" for name in ("NatsServer", "KafkaServer", "PostgresServer", "nats_cluster")}
            | {"tests.kafka.mock_cluster", "confluent_kafka", "nats", "psycopg", "pyspark"}
        ),
    ),
    Rule("process", frozenset({"spawn"}), frozenset({"subprocess", "multiprocessing", "concurrent.futures"})),
    Rule("thread", frozenset(), frozenset({"threading", "lanes.pool", "lanes.threads", "anyio.to_thread"})),
    Rule("timer", frozenset(), frozenset({"tests.components.wait_until", "tests.components.waiting"}), coroutines=True),
)


@dataclass(frozen=True)
class Seen:
    """What the rules look at. ``allowed`` is in seconds, 0 for the usual; ``imports`` are those of its files."""

    fixtures: frozenset[str]
    imports: frozenset[str]
    coroutine: bool
    allowed: float = 0.0


def rule_of(test: Seen) -> Rule | None:
    """The first rule that holds; None for a test that does not depend on time, and for one of the long ones."""
    if test.allowed > LONGEST:
        return None
    for rule in RULES:
        if (rule.coroutines and test.coroutine) or rule.fixtures & test.fixtures or _any_within(rule, test.imports):
            return rule
    return None


def _any_within(rule: Rule, imports: Set[str]) -> bool:
    return any(one == wanted or one.startswith(f"{wanted}.") for wanted in rule.imports for one in imports)


@cache
def imports_of(file: Path, root: Path = ROOT) -> frozenset[str]:
    """The dotted names that a file and its helpers import, as they are written: reads files, once each."""
    found: set[str] = set()
    seen, ahead = {file}, [file]
    while ahead:
        names = set(_imported(ast.parse(ahead.pop().read_text())))
        found |= names
        helpers = {helper for name in names for helper in _helpers(name, root)}
        ahead += sorted(helpers - seen)
        seen |= helpers
    return frozenset(found)


def _imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _helpers(name: str, root: Path) -> Iterator[Path]:
    """The file of `tests.a.b`, where it is one that is followed."""
    if name.startswith(FOLLOWED) and not name.startswith(NOT_FOLLOWED):
        path = root.joinpath(*name.split(".")).with_suffix(".py")
        if path.is_file():
            yield path
