"""``http=`` of ``lanes.main`` in a process: metrics, an address in use, and the end of the port with the process."""

from __future__ import annotations

import errno
import re
import signal
import socket
import subprocess
from threading import enumerate as enumerate_threads
from typing import NamedTuple

import anyio
import pytest
from prometheus_client.parser import text_string_to_metric_families

import lanes
from lanes import ConfigError
from lanes.web import Web
from lanes.web.port import Port, listener
from lanes.web.settings import Address
from memsource.memory.source import MemorySource
from tests.conftest import Spawn
from tests.fakes.support import acknowledge, consumer_of, published
from tests.web.conftest import Answer, Ports

pytestmark = pytest.mark.process

PROGRAM = """
import logging, sys
import lanes
from memsource import MemoryBroker, MemorySource

{provider}
logging.basicConfig(level=logging.INFO, format="%(name)s %(message)s")
broker = MemoryBroker()
for number in range(3):
    broker.publish("x", key=f"secret-{{number}}")


async def handler(message):
    pass


lanes.main(MemorySource(broker), handler, http={http!r}, backend={backend!r})
"""

OWN_PROVIDER = """
from opentelemetry import metrics
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider

own = MeterProvider([PrometheusMetricReader()])
metrics.set_meter_provider(own)
own.get_meter("mine").create_counter("mine").add(1)
"""


class Served(NamedTuple):
    """A process that serves a port."""

    process: subprocess.Popen[str]
    address: str

    def get(self, path: str) -> Answer:
        host, _, port = self.address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            connection.sendall(f"GET {path} HTTP/1.1\r\nHost: pod\r\nConnection: close\r\n\r\n".encode())
            whole = b""
            while chunk := connection.recv(65_536):
                whole += chunk
        head, _, body = whole.partition(b"\r\n\r\n")
        return Answer(int(head.split()[1]), {}, body)


def served(spawn: Spawn, *, provider: str = "", backend: str = "asyncio") -> Served:
    """Start a process, and wait until the process says its address."""
    process = spawn("-W", "error", "-c", PROGRAM.format(provider=provider, http="127.0.0.1:0", backend=backend))
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search(r"serving http://(\S+)", line):
            return Served(process, found[1])
    raise AssertionError("the process has not said its address")


def settled(served: Served) -> dict[str, float]:
    """The metrics of the process, once its consumer has settled all messages.

    The gauges and the counters of one answer are read one after the other, so an answer can show both states.
    """
    for _ in range(600):
        families = text_string_to_metric_families(served.get("/metrics").body.decode())
        found = {sample.name: sample.value for family in families for sample in family.samples}
        if found.get("lanes_settled_total") == 3 and found["lanes_in_flight_messages"] == 0:
            return found
    raise AssertionError("the metrics do not show 3 settled messages and none in flight")


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_the_official_client_reads_the_metrics_and_a_signal_ends_the_port(spawn: Spawn, backend: str) -> None:
    job = served(spawn, backend=backend)
    settled(job)
    assert b"secret" not in job.get("/metrics").body
    job.process.send_signal(signal.SIGTERM)
    assert job.process.wait(30) == 0
    with pytest.raises(ConnectionError):
        job.get("/live")


def test_a_provider_of_the_program_stays_and_its_reader_serves_the_metrics(spawn: Spawn) -> None:
    job = served(spawn, provider=OWN_PROVIDER)
    metrics = settled(job)
    assert metrics["mine_total"] == 1
    job.process.send_signal(signal.SIGTERM)
    assert job.process.wait(30) == 0


def test_an_address_in_use_and_a_wrong_address_end_the_process_with_one_line(spawn: Spawn) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        job = spawn("-c", PROGRAM.format(provider="", http=address, backend="asyncio"))
        _, said = job.communicate(timeout=30)
    assert job.returncode == 1
    assert f'lanes: ConfigError: http="{address}": cannot listen there (Address already in use); choose an' in said
    wrong = {
        "8080": "http='8080': write a host and a port",
        "no.such.host.invalid:8080": 'http="no.such.host.invalid:8080": the host is unknown',
        "192.0.2.1:8080": 'http="192.0.2.1:8080": cannot listen there (Cannot assign requested address); write an '
        "address of this machine, such as 127.0.0.1, or 0.0.0.0 for all its addresses",
    }
    for http, error in wrong.items():
        job = spawn("-c", PROGRAM.format(provider="", http=http, backend="asyncio"))
        _, said = job.communicate(timeout=30)
        assert (job.returncode, "Traceback" in said) == (1, False)
        assert f"lanes: ConfigError: {error}" in said


def test_a_port_that_needs_a_right_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(socket, "create_server", refuse)
    with pytest.raises(
        ConfigError, match=r"cannot listen there \(Permission denied\); choose a port above 1023, or run"
    ):
        listener(Address("127.0.0.1", 80))


@pytest.mark.anyio
async def test_serve_closes_its_port_at_its_end(sdk: object) -> None:
    source = MemorySource(published("a"))
    source.finish()
    assert await lanes.serve(consumer_of(source, acknowledge), http="127.0.0.1:0") == 0
    assert not [thread for thread in enumerate_threads() if thread.name == "lanes-web"]


def test_the_extra_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lanes.web.opening.find_spec", lambda name: None if name == "uvicorn" else object())
    with pytest.raises(ConfigError, match=r"http= needs uvicorn: pip install '\.\[web\]'"):
        anyio.run(lambda: lanes.serve(consumer_of(MemorySource(published()), acknowledge), http="127.0.0.1:0"))


def test_a_port_closes_twice_and_without_a_start(ports: Ports) -> None:
    consumer = consumer_of(MemorySource(published()), acknowledge)
    port = ports.open(consumer)
    port.close()
    port.close()
    assert not [thread for thread in enumerate_threads() if thread.name == "lanes-web"]
    Port(consumer, Web(address="127.0.0.1:0")).close()
