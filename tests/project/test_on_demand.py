"""The processes of a test session share one broker, which the first request starts"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Client
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.components import ComponentError, KafkaServer, MissingComponent
from tests.components.kafka_properties import Ports
from tests.components.kafka_server import RunningBroker
from tests.components.on_demand import OnDemand, ask
from tests.conftest import pytest_configure_node


def test_the_first_request_starts_the_server_and_all_requests_have_one_answer(temporary: Path) -> None:
    started: list[str] = []
    go_on = threading.Event()

    def start() -> RunningBroker:
        started.append("once")
        go_on.wait()
        return RunningBroker(temporary, Ports(1, 2, 3))

    server = OnDemand(start)
    try:
        assert started == []
        with ThreadPoolExecutor(4) as pool:
            answers = [pool.submit(ask, server.address) for _ in range(4)]
            go_on.set()
            assert {answer.result(10) for answer in answers} == {RunningBroker(temporary, Ports(1, 2, 3))}
        assert started == ["once"]
    finally:
        go_on.set()
        server.close()
    assert list(temporary.iterdir()) == []
    with pytest.raises(FileNotFoundError):
        ask(server.address)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MissingComponent("Kafka needs Java"), r"^Kafka needs Java$"),
        (OSError(28, "No space left on device"), r"^the start failed with OSError\(28, 'No space left on device'\)$"),
        (RuntimeError("no memory"), r"^the start failed with RuntimeError\('no memory'\)$"),
    ],
)
def test_each_request_for_a_server_that_does_not_start_gets_its_error(
    error: Exception, said: str, temporary: Path
) -> None:
    started: list[str] = []

    def start() -> None:
        started.append("once")
        raise error

    server = OnDemand(start)
    try:
        for _ in range(2):
            with pytest.raises(ComponentError, match=said):
                ask(server.address)
    finally:
        server.close()
    assert started == ["once"]


def test_a_process_that_ends_before_its_answer_disturbs_no_other_process(temporary: Path) -> None:
    server = OnDemand(lambda: "here")
    try:
        Client(server.address).close()
        assert ask(server.address) == "here"
    finally:
        server.close()


def test_the_process_that_did_not_start_a_broker_knows_its_addresses_and_cannot_end_it(tmp_path: Path) -> None:
    (tmp_path / "lock").touch()
    server = KafkaServer.of_another_process(RunningBroker(tmp_path, Ports(7, 7, 8)))
    assert server.url == server.admin_url == "127.0.0.1:7" and server.folder == tmp_path
    assert server.running() == RunningBroker(tmp_path, Ports(7, 7, 8))
    for act in (server.kill, server.pause, lambda: server.pid):
        with pytest.raises(ComponentError, match="not running"):
            act()


def test_all_processes_of_a_session_get_one_address_and_no_broker_is_started(temporary: Path) -> None:
    cleanups: list[Any] = []
    config = SimpleNamespace(stash=pytest.Stash(), add_cleanup=cleanups.append)
    nodes = [SimpleNamespace(config=config, workerinput={}) for _ in range(2)]
    for node in nodes:
        pytest_configure_node(node)
    assert nodes[0].workerinput == nodes[1].workerinput != {}
    for cleanup in reversed(cleanups):  # in the order of pytest
        cleanup()
    assert list(temporary.iterdir()) == []
