"""A running consumer collects garbage less often, and its process is as before at the end."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

import lanes
from lanes.process import EXIT_DRAINED
from lanes.runtime.garbage import YOUNG_OBJECTS, tuned_gc
from memsource import MemorySource
from tests.fakes.support import published

USUAL = (700, 10, 10)


class Node:
    """An object that refers to itself."""

    def __init__(self) -> None:
        self.itself = self


class Freezes:
    """The frozen objects of a process. The tests freeze all objects of pytest, so a test must not unfreeze them."""

    def __init__(self) -> None:
        self.count = 0
        self.calls: list[str] = []

    def freeze(self) -> None:
        self.calls.append("freeze")
        self.count = 1_000

    def unfreeze(self) -> None:
        self.calls.append("unfreeze")
        self.count = 0


@pytest.fixture(autouse=True)
def freezes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Freezes]:
    """Python's default thresholds and no frozen objects during the test; the former thresholds return afterwards."""
    frozen, before = Freezes(), gc.get_threshold()
    monkeypatch.setattr(gc, "freeze", frozen.freeze)
    monkeypatch.setattr(gc, "unfreeze", frozen.unfreeze)
    monkeypatch.setattr(gc, "get_freeze_count", lambda: frozen.count)
    gc.set_threshold(*USUAL)
    yield frozen
    gc.set_threshold(*before)


class Looking:
    """A handler that looks at the collector, and its source of one message."""

    def __init__(self, freezes: Freezes) -> None:
        self.freezes = freezes
        self.seen: list[tuple[int, int]] = []
        self.source = MemorySource(published("a"))
        self.source.finish()

    async def __call__(self, message: lanes.Message) -> None:
        self.seen.append((gc.get_threshold()[0], self.freezes.count))


@pytest.mark.anyio
@pytest.mark.parametrize(("chosen", "seen"), [("tuned", (YOUNG_OBJECTS, 1_000)), ("default", (USUAL[0], 0))])
async def test_serve_tunes_the_collector_until_its_end(chosen: Any, seen: tuple[int, int], freezes: Freezes) -> None:
    handler = Looking(freezes)
    assert await lanes.serve(lanes.Consumer(handler.source, handler), gc=chosen) == EXIT_DRAINED
    assert (handler.seen, gc.get_threshold(), freezes.count) == ([seen], USUAL, 0)


@pytest.mark.parametrize(("chosen", "seen"), [("tuned", (YOUNG_OBJECTS, 1_000)), ("default", (USUAL[0], 0))])
def test_main_tunes_the_collector(chosen: Any, seen: tuple[int, int], freezes: Freezes) -> None:
    handler = Looking(freezes)
    with pytest.raises(SystemExit) as ended:
        lanes.main(handler.source, handler, gc=chosen)
    assert (ended.value.code, handler.seen) == (EXIT_DRAINED, [seen])


def test_main_refuses_an_unknown_collector(capsys: pytest.CaptureFixture[str], freezes: Freezes) -> None:
    handler = Looking(freezes)
    with pytest.raises(SystemExit):
        lanes.main(handler.source, handler, gc="off")  # type: ignore[arg-type]
    assert capsys.readouterr().err == 'lanes: ConfigError: gc=\'off\' is unknown: use "tuned" or "default"\n'


def test_a_program_tunes_its_collector_for_good(freezes: Freezes) -> None:
    with tuned_gc(freeze=True):
        lanes.tune_gc()
    assert (gc.get_threshold()[0], freezes.calls) == (YOUNG_OBJECTS, ["freeze"])
    lanes.tune_gc()
    assert (gc.get_threshold()[0], freezes.calls) == (YOUNG_OBJECTS, ["freeze"])


def test_cycles_are_still_collected() -> None:
    lanes.tune_gc()
    first = weakref.ref(Node())
    assert first() is not None
    for _ in range(2 * YOUNG_OBJECTS):
        Node()
    assert first() is None


def test_the_last_of_several_blocks_leaves_the_process_as_it_was(freezes: Freezes) -> None:
    with tuned_gc(freeze=True):
        with tuned_gc(freeze=True):
            pass
        assert (gc.get_threshold()[0], freezes.calls) == (YOUNG_OBJECTS, ["freeze"])
    assert (gc.get_threshold(), freezes.calls) == (USUAL, ["freeze", "unfreeze"])


@pytest.mark.parametrize("own", [(0, 10, 10), (YOUNG_OBJECTS, 5, 5)])
def test_the_thresholds_of_the_process_are_kept(own: tuple[int, int, int]) -> None:
    gc.set_threshold(*own)
    with tuned_gc(freeze=False):
        assert gc.get_threshold() == own
    assert gc.get_threshold() == own


def test_thresholds_that_a_handler_sets_are_kept() -> None:
    with tuned_gc(freeze=False):
        gc.set_threshold(9_000, 10, 10)
    assert gc.get_threshold() == (9_000, 10, 10)


def test_objects_that_the_process_has_frozen_stay_frozen(freezes: Freezes) -> None:
    freezes.count = 7
    with tuned_gc(freeze=True):
        pass
    freezes.count = 0
    with tuned_gc(freeze=True):
        # Another part of the program has frozen more objects meanwhile.
        freezes.count = 2_000
    assert freezes.calls == ["freeze"]


def test_a_process_that_never_collects_freezes_nothing(freezes: Freezes) -> None:
    gc.disable()
    try:
        lanes.tune_gc()
    finally:
        gc.enable()
    assert freezes.calls == []
