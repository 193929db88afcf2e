"""``lanes.main`` runs a consumer on the chosen event loop."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import lanes
from lanes.loops import backend_arguments
from lanes.process import EXIT_DRAINED
from memsource import MemorySource
from tests.fakes.support import published


@pytest.mark.parametrize(
    ("backend", "installed", "arguments"),
    [
        ("asyncio", True, {"backend": "asyncio"}),
        ("trio", True, {"backend": "trio"}),
        ("auto", False, {"backend": "asyncio"}),
        ("auto", True, {"backend": "asyncio", "backend_options": {"use_uvloop": True}}),
        ("uvloop", True, {"backend": "asyncio", "backend_options": {"use_uvloop": True}}),
    ],
)
def test_the_event_loop_auto_is_uvloop_if_uvloop_is_installed(
    backend: str, installed: bool, arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lanes.loops.find_spec", lambda name: object() if installed else None)
    assert backend_arguments(backend) == arguments


@pytest.mark.parametrize("backend", ["auto", "uvloop"])
def test_main_runs_on_uvloop(backend: Any) -> None:
    pytest.importorskip("uvloop")
    source, loops = MemorySource(published("a")), []
    source.finish()

    async def handler(message: lanes.Message) -> None:
        loops.append(type(asyncio.get_running_loop()).__module__)

    with pytest.raises(SystemExit) as ended:
        lanes.main(source, handler, backend=backend)
    assert (ended.value.code, loops) == (EXIT_DRAINED, ["uvloop"])
