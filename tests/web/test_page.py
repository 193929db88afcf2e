"""The live page: its snapshots, its files, the names by which browsers may open it, and hostile keys in a browser."""

from __future__ import annotations

import http.client
import json
import logging
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import anyio
import pytest

from lanes import Message
from lanes.history.writer import key_hash
from lanes.web.lines import KEPT
from lanes.web.port import Port
from lanes.web.values import SHOWN_PARTITIONS
from memsource.memory.publisher import MemoryPublisher
from memsource.memory.source import MemorySource
from tests.fakes.support import Gated, acknowledge, consumer_of, fail, published, started, until
from tests.web.conftest import Ports, ask

pytestmark = pytest.mark.anyio

EVIL: Final = b"<img src=x onerror=\"document.title='run'\"><script>document.title='run'</script>"
NODE: Final = shutil.which("node")
PAGE: Final = files("lanes.web").joinpath("page.js").read_text(encoding="utf-8").replace('"use strict";', "")
NO_BROWSER: Final = """
const found = {};
globalThis.document = {
  getElementById: (id) => (found[id] ??= Object.defineProperty({}, "addEventListener", { value() {} })),
  addEventListener() {},
};
globalThis.EventSource = class {};
"""
"""The parts of a browser that the script of the page uses at its start."""

BROWSER: Final = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def snapshots(port: Port) -> Iterator[Any]:
    """The snapshots of the stream of events."""
    connection = http.client.HTTPConnection(port.address.host, port.address.port, timeout=30)
    try:
        connection.request("GET", "/events")
        answer = connection.getresponse()
        assert answer.getheader("content-type", "").startswith("text/event-stream")
        while line := answer.readline():
            if line.startswith(b"data: "):
                yield json.loads(line.removeprefix(b"data: "))
    finally:
        connection.close()


def snapshot(port: Port) -> Any:
    return next(snapshots(port))


async def test_a_blocked_lane_is_shown_with_its_error_and_without_its_key(
    ports: Ports, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lanes")
    source = MemorySource(published("a", "secret"))

    async def handler(message: Message) -> None:
        if message.key == b"secret":
            await fail(message)

    consumer = consumer_of(source, handler, poison="block")
    port = ports.open(consumer)
    async with started(consumer) as run:
        await until(lambda: consumer.status().blocked)
        with anyio.fail_after(30):
            found = await anyio.to_thread.run_sync(lambda: next(each for each in snapshots(port) if each["stopped"]))
        stopped = found["stopped"][0]
        assert (stopped["waits"], stopped["error"], stopped["position"]) == ("blocked", "ValueError", 1)
        assert stopped["key_hash"] == key_hash(b"secret")
        assert not found["healthy"]
        assert not found["operate"]
        assert any("blocked" in event for event in found["events"])
        assert "secret" not in json.dumps(found)
        await run.stop()


async def test_a_lane_that_waits_for_its_retry_is_shown_with_the_time_that_is_left(ports: Ports) -> None:
    consumer = consumer_of(MemorySource(published("a")), fail, attempts=3, backoff=20.0)
    port = ports.open(consumer)
    async with started(consumer) as run:
        await until(lambda: consumer.status().held)
        found = await anyio.to_thread.run_sync(lambda: next(each for each in snapshots(port) if each["stopped"]))
        assert found["stopped"][0]["waits"] == "retry"
        assert 0 < found["stopped"][0]["left"] <= 30
        consumer.stop(at_once=True)
        await run.end()


async def test_a_lane_that_waits_for_the_next_send_of_its_outputs_is_shown(ports: Ports) -> None:
    publisher = MemoryPublisher()
    publisher.refused["out"] = OSError("not now")

    async def handler(message: Message) -> None:
        await message.publish("out", b"")

    consumer = consumer_of(MemorySource(published("a")), handler, publisher=publisher, backoff=20.0)
    port = ports.open(consumer)
    async with started(consumer) as run:
        await until(lambda: consumer.status().publish_held)
        found = await anyio.to_thread.run_sync(lambda: next(each for each in snapshots(port) if each["stopped"]))
        assert found["stopped"][0]["waits"] == "outputs"
        assert (found["stopped"][0]["error"], found["stopped"][0]["position"]) == ("OSError", 0)
        consumer.stop(at_once=True)
        await run.end()


async def test_a_snapshot_has_the_partitions_with_the_oldest_messages(ports: Ports) -> None:
    count = SHOWN_PARTITIONS + 20
    handler = Gated()
    consumer = consumer_of(MemorySource(published("a", partitions=count, partition=count - 1)), handler)
    port = ports.open(consumer)
    async with started(consumer) as run:
        await until(lambda: handler.running)
        found = await anyio.to_thread.run_sync(
            lambda: next(each for each in snapshots(port) if each["status"]["in_flight"])
        )
        assert found["partition_count"] == count
        assert len(found["status"]["partitions"]) == SHOWN_PARTITIONS
        assert f"memory/{count - 1}" in found["status"]["partitions"]
        handler.let(0)
        await run.stop()


async def test_the_page_keeps_the_last_lines_until_its_port_closes(
    ports: Ports, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lanes")
    log = logging.getLogger("lanes")
    port = ports.open(consumer_of(MemorySource(published()), acknowledge))
    for number in range(KEPT + 5):
        log.info("line %d\x1b[31m", number)
    events = (await anyio.to_thread.run_sync(snapshot, port))["events"]
    assert len(events) == KEPT
    assert events[0].endswith(f"INFO line {KEPT + 4}\\x1b[31m")
    handlers = log.handlers[:]
    port.close()
    assert len(log.handlers) == len(handlers) - 1


async def test_the_files_of_the_page_allow_no_script_of_another_place(ports: Ports) -> None:
    port = ports.open(consumer_of(MemorySource(published()), acknowledge))
    for path, kind in (("/", "text/html"), ("/page.js", "text/javascript"), ("/page.css", "text/css")):
        answer = await anyio.to_thread.run_sync(ask, port, path)
        assert answer.status == 200
        assert answer.headers["content-type"].startswith(kind)
        assert "default-src 'none'; script-src 'self'" in answer.headers["content-security-policy"]
        assert b"innerHTML" not in answer.body


@pytest.mark.parametrize("path", ["/", "/page.js", "/page.css", "/events"])
async def test_a_foreign_host_and_a_foreign_origin_are_refused(ports: Ports, path: str) -> None:
    consumer = consumer_of(MemorySource(published()), acknowledge)
    port, named = ports.open(consumer), ports.open(consumer, hosts=["ops.example.com"])
    own = f"127.0.0.1:{port.address.port}"
    asked = {
        (port, "evil.example.com", ""): 403,
        (port, "127.0.0.1.evil.example.com", ""): 403,
        (port, own, "http://evil.example.com"): 403,
        (port, own, "null"): 403,
        (port, "ops.example.com", ""): 403,
        (named, "evil.example.com", ""): 403,
    }
    for (which, host, origin), status in asked.items():
        headers: dict[str, Any] = {"Host": host} | ({"Origin": origin} if origin else {})
        assert (await anyio.to_thread.run_sync(partial(ask, which, path, **headers))).status == status
    if path != "/events":
        for which, host in ((port, own), (port, "localhost"), (port, "[::1]:80"), (named, "OPS.example.com:8443")):
            assert (await anyio.to_thread.run_sync(partial(ask, which, path, Host=host))).status == 200


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs chromium")
async def test_a_browser_shows_a_hostile_key_as_text(ports: Ports, tmp_path: Path) -> None:
    consumer = consumer_of(MemorySource(published(*[f"key {n}" for n in range(1_000)], EVIL)), fail, poison="block")
    port = ports.open(consumer, show_keys=True)
    async with started(consumer) as run:
        await until(lambda: consumer.status().blocked)
        with anyio.fail_after(30):
            await anyio.to_thread.run_sync(lambda: next(each for each in snapshots(port) if each["stopped"]))
        # A stream without an end would keep the browser waiting.
        port._routes.close()
        shown = await anyio.to_thread.run_sync(_dom, port, tmp_path)
        assert "<title>lanes</title>" in shown
        holders = re.findall(r"<tbody>.*?</tbody>", shown, re.DOTALL)[0]
        assert "for an operator" in holders
        # The last attempt of a blocked message is a failed attempt without a retry.
        assert "<dt>retries</dt>" in shown and "<dt>failed attempts</dt>" not in shown
        assert "<img" not in shown
        assert len(re.findall("<script", shown)) == 1
        consumer.stop(at_once=True)
        await run.end()


@pytest.mark.skipif(NODE is None, reason="needs node")
@pytest.mark.parametrize(
    ("state", "said", "name"),
    [
        ({}, "ready · snapshot 0.5 s old", "good"),
        ({"healthy": False}, "unhealthy · ready · snapshot 0.5 s old", "bad"),
        ({"live": False, "healthy": False}, "not live · unhealthy · ready · snapshot 0.5 s old", "bad"),
    ],
)
def test_the_state_in_red_says_why(state: dict[str, bool], said: str, name: str) -> None:
    assert NODE is not None
    now = {"name": "orders", "live": True, "healthy": True, "ready": True, "draining": False, "loop_silent": 0} | state
    script = f"{NO_BROWSER}{PAGE}showState({json.dumps({**now, 'age': 0.5})});console.log(JSON.stringify(found.state));"
    shown = subprocess.run([NODE, "-e", script], capture_output=True, text=True, timeout=100, check=True).stdout
    assert json.loads(shown) == {"textContent": said, "className": name}


def _dom(port: Port, profile: Path) -> str:
    assert BROWSER is not None
    command = [
        *(BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
        *(f"--user-data-dir={profile}", "--window-size=390,800", "--virtual-time-budget=1000", "--dump-dom"),
        f"http://{port.address}/",
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=True).stdout
