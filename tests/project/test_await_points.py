"""Every place that looks at state before an await and relies on it after the await has a test or a reason."""

from __future__ import annotations

import ast
from textwrap import dedent

import pytest

from tests.project.await_points import ROOT, Shown, await_points, in_source
from tests.project.await_table import TABLE


def test_every_await_point_is_in_the_table() -> None:
    found = {str(place): line for place, line in await_points().items()}
    missing = [f"{place} (line {line})" for place, line in found.items() if place not in TABLE]
    assert not missing, "name the test that changes the state there, or why a change does not matter"
    stale = [place for place in TABLE if place not in found]
    assert not stale, "these places are gone: remove them from the table"


@pytest.mark.parametrize("test", sorted({each.test for each in TABLE.values() if isinstance(each, Shown)}))
def test_each_test_of_the_table_of_await_points_exists(test: str) -> None:
    file, _, name = test.partition("::")
    tree = ast.parse((ROOT / file).read_text())
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    assert name in functions


def places(source: str) -> list[str]:
    return [f"{place.function}::{place.state}" for place, _ in in_source(dedent(source), "file.py")]


@pytest.mark.parametrize(
    ("source", "found"),
    [
        (
            """
            async def used_after():
                owned = self.of(partition)
                await flush()
                give_up(owned)
            """,
            ["used_after::of"],
        ),
        (
            """
            async def asked_after():
                await flush()
                give_up(self.of(partition))
            """,
            [],
        ),
        (
            """
            async def early_exit():
                if self._closed:
                    return
                await flush()
                send()
            """,
            ["early_exit::closed"],
        ),
        (
            """
            async def inside():
                while not self.draining:
                    await flush()
                    send()
            """,
            ["inside::draining"],
        ),
        (
            """
            async def last():
                if self.client.is_connected:
                    await flush()
            """,
            [],
        ),
        (
            """
            async def each():
                for owned in list(self.by_number.values()):
                    await flush(owned)
            """,
            ["each::by_number"],
        ),
        (
            """
            def callbacks():
                before = self.group.rebalances
                raws = self.client.consume(1, 0)
                return raws, before
            """,
            ["callbacks::rebalances"],
        ),
    ],
    ids=["used_after", "asked_after", "early_exit", "inside", "last", "each", "callbacks"],
)
def test_the_finder_finds_what_is_relied_on_after_an_await(source: str, found: list[str]) -> None:
    assert places(source) == found
