"""Which tests depend on the machine's time, by rules that a reader can check.

A test is chosen by the first rule that holds. What "its files" import is what is imported anywhere in the test's own
file and in the helpers of `tests/`, `bench/` and `fuzz/` that it imports, and these, and so on. `tests/conftest.py` is
not followed: what it starts is asked for by the name of a fixture. Left out are tests that may take longer than
`LONGEST`, by their own mark: they do much in one run, and the full runs have them.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from typing import Final

from blake3 import blake3

ROOT: Final = Path(__file__).resolve().parents[2]

LONGEST: Final = 300.0
"""Seconds that a test may be allowed, to be run again and again."""

FOLLOWED: Final = ("tests.", "bench.", "fuzz.")
NOT_FOLLOWED: Final = ("tests.conftest", "tests.components")
"""The starter imports all of its servers: what is asked of it is named by who asks."""

PRODUCT: Final = ("lanes", "adapters", "memsource", "pyproject.toml", "tests/conftest.py", "tests/components")
READ: Final = ("README", "Makefile", "docs", "examples", "bench", "fuzz")
"""What a test may read or run, and no import tells of: all of it is what a test is made of whose files name it."""
MADE: Final = ("__pycache__", "out")
"""Folders whose files come and go by themselves."""


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
    Rule(
        "thread",
        frozenset(),
        frozenset({"threading", "lanes.workers.pool", "lanes.workers.threads", "anyio.to_thread"}),
    ),
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


@dataclass(frozen=True)
class Imported:
    """By a file and its helpers: the dotted ``names``, as they are written, and the ``files``, with that one itself."""

    names: frozenset[str]
    files: frozenset[Path]


@cache
def imports_of(file: Path, root: Path = ROOT) -> Imported:
    """What a test's file imports, and its helpers, and theirs: reads files, once each."""
    found: set[str] = set()
    seen, ahead = {file}, [file]
    while ahead:
        names = set(_imported(ast.parse(ahead.pop().read_text())))
        found |= names
        helpers = {helper for name in names for helper in _helpers(name, root)}
        ahead += sorted(helpers - seen)
        seen |= helpers
    return Imported(frozenset(found), frozenset(seen))


def product(root: Path = ROOT) -> str:
    """A digest of what every test is about or starts: the packages, the settings, what starts the servers, and what is
    installed."""
    installed = sorted(f"{one.name} {one.version}" for one in distributions())
    return _digest(root, [path for name in PRODUCT for path in _files(root / name)], [sys.version, *installed])


@cache
def made_of(file: Path, root: Path = ROOT) -> str:
    """A digest of a test's file, its helpers and those beside it, and the documents and examples that these name."""
    files = set(imports_of(file, root).files)
    # Also what beside it is started as a process of its own. The `conftest.py` of all is what every test is about.
    folders = [folder for folder in file.parents if root / "tests" in folder.parents]
    files |= {one for folder in folders for one in folder.glob("*.py") if not one.name.startswith("test_")}
    text = "\n".join(one.read_text() for one in files)
    for name in READ:
        if re.search(rf"\b{name}\b", text):
            files.update(path for one in root.glob(f"{name}*") for path in _files(one))
    return _digest(root, files)


def everything(root: Path = ROOT) -> str:
    """A digest of all tests and helpers there are, and of what they may read."""
    read = [path for name in READ for path in root.glob(f"{name}*")]
    return _digest(root, [one for path in (root / "tests", *read) for one in _files(path)])


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
    elif path.is_dir():
        yield from (
            one for one in path.rglob("*") if one.is_file() and not set(MADE) & set(one.relative_to(path).parts)
        )


def _digest(root: Path, files: Iterable[Path], words: Iterable[str] = ()) -> str:
    digest = blake3("\n".join(words).encode())
    for file in sorted(set(files)):
        content = file.read_bytes()
        digest.update(f"{os.path.relpath(file, root)} {len(content)}\n".encode())
        digest.update(content)
    return str(digest.hexdigest(8))


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
