"""A demo refuses invalid settings, and a worker gets all settings from its environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from demo import DemoConfig, DemoError, Faults
from demo.config import VARIABLE, WorkerConfig
from demo.places import places


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"server": "http://127.0.0.1:4222"}, "--server: must be the URL of a NATS server"),
        ({"server": ""}, "--server: must be the URL of a NATS server"),
        ({"server": "a b"}, "--server: must be the URL of a NATS server"),
        ({"server": "nats://127.0.0.1:99999"}, "--server: must be the URL of a NATS server"),
        ({"server": "nats://"}, "--server: must be the URL of a NATS server"),
        ({"server": "nats://a:1,"}, "--server: must be the URL of a NATS server"),
        ({"events": 0}, "events=0: must be 1 or more"),
        ({"latency": -1.0}, "latency=-1.0: must be a finite number of seconds, 0 or more"),
        ({"latency": float("nan")}, "latency=nan"),
        ({"serial_seconds": float("inf")}, "serial_seconds=inf"),
        ({"stall_timeout": 0.5}, "stall_timeout=0.5: must be a finite number of seconds, 1 or more"),
        ({"ack_wait": 0.0}, "ack_wait=0.0"),
        ({"kill_at": (0.5, 0.2)}, r"kill_at=\[0.5, 0.2\]: must be rising fractions"),
        ({"kill_at": (0.5, 0.5)}, "kill_at"),
        ({"kill_at": (1.0,)}, "kill_at"),
        ({"kill_at": (float("nan"),)}, "kill_at"),
        ({"worker_command": "python"}, "worker_command='python': must be a sequence"),
        ({"name": "a.b"}, "name='a.b': must be 1 to 32"),
        ({"concurrency": 0}, "concurrency=0: must be a whole number, 1 or more"),
        ({"members": 0}, "members=0: must be 1 to 64"),
        ({"members": 9, "partitions": 8}, "members=9: must be 1 to 8"),
        ({"broker": "kafka", "server": "h:9092", "members": 1}, "members=1: must be 2 to 8"),
        ({"broker": "postgres", "server": "postgresql://h/d", "members": 1}, "members=1: must be 2 to 64"),
        ({"broker": "postgres", "server": "postgresql://h/d", "width": 2}, "width=2: a log of PostgreSQL is one queue"),
        ({"broker": "postgres"}, "--server: must be the URL of a PostgreSQL server"),
        ({"partitions": 101}, "partitions=101: must be 1 to 100"),
        ({"width": 0}, "width=0: must be 1 to 64 physical queues, such as 4"),
        ({"width": 65}, "width=65: must be 1 to 64 physical queues"),
        ({"width": 2, "members": 3}, "members=3: must be 1 to 2, because .* each member needs a partition"),
        ({"lease": 2.0}, "lease=2.0: must be a finite number of seconds, 3 or more"),
        ({"retention": "all"}, "retention='all': must be 'limits' or 'workqueue' or 'interest'"),
        (
            {"retention": "interest", "members": 2},
            "serial_seconds=3.5 with retention='interest': .*; set serial_seconds=0",
        ),
        ({"concurrency": 10, "max_in_flight": 5}, "max_in_flight=5 is below concurrency=10"),
    ],
)
def test_impossible_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DemoError, match=message):
        DemoConfig(**{"server": "nats://127.0.0.1:4222", **changes})


def test_members_and_broker_decide_the_number_of_processes_and_partitions() -> None:
    alone, cohort = (DemoConfig(server="nats://127.0.0.1:4222", members=members) for members in (None, 4))
    group = DemoConfig(broker="kafka", server="h:9092")
    subscription = DemoConfig(broker="postgres", server="postgresql://me@h:5432/d")
    assert [(one.processes, one.shared, one.in_group) for one in (alone, cohort, group, subscription)] == [
        (1, 64, False),
        (4, 64, True),
        (3, 8, True),
        (3, 64, True),
    ]


@pytest.mark.parametrize(
    ("broker", "members", "partitions", "width", "shared"),
    [
        ("kafka", 3, None, 1, 8),
        ("kafka", 3, None, 3, 9),
        ("kafka", 3, None, 16, 16),
        ("kafka", 3, 4, 4, 4),
        ("jetstream", 3, None, 1, 64),
        ("jetstream", 3, None, 4, 4),
    ],
)
def test_all_physical_queues_have_the_same_number_of_partitions(
    broker: Any, members: int, partitions: int | None, width: int, shared: int
) -> None:
    server = "h:9092" if broker == "kafka" else "nats://h:4222"
    one = DemoConfig(broker=broker, server=server, members=members, partitions=partitions, width=width)
    assert one.shared == shared


def test_a_worker_gets_all_settings_from_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    told = WorkerConfig(
        server="nats://127.0.0.1:4222",
        stream="S",
        durable="d",
        dead_subject="dead.s",
        service="unix:/x",
        token="t",
        history="/h",
        member="worker-1",
        concurrency=3,
        max_in_flight=4,
        ack_wait=30.0,
        seconds=1.0,
        fail_every=7,
        poison_every=8,
        queue="declarations.x",
        width=4,
    )
    monkeypatch.setenv(VARIABLE, told.environment()[VARIABLE])
    assert WorkerConfig.load() == told
    assert told.faults == Faults(fail_every=7, poison_every=8)


@pytest.mark.parametrize("text", ["", "{", "{}", "[]", '{"server": 1}'])
def test_a_worker_without_its_configuration_names_the_missing_variable(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(DemoError, match="LANES_DEMO_WORKER has no configuration of a worker"):
        WorkerConfig.load()


def test_the_folder_to_keep_must_be_empty(tmp_path: Path) -> None:
    with places(tmp_path / "new") as where:
        assert where.folder == tmp_path / "new"
        (where.folder / "ledger.sqlite").touch()
        temporary = where.sockets
        assert temporary != where.folder
    assert not temporary.exists()
    assert (tmp_path / "new" / "ledger.sqlite").exists()
    with pytest.raises(DemoError, match=r"is not empty \(ledger\.sqlite\)"), places(tmp_path / "new"):
        pass
    with pytest.raises(DemoError, match="cannot be created or read"), places(tmp_path / "new" / "ledger.sqlite"):
        pass


def test_a_run_without_a_folder_to_keep_removes_its_files() -> None:
    with places(None) as where:
        (where.folder / "ledger.sqlite").touch()
    assert not where.folder.exists()


def test_a_missing_temporary_folder_is_one_clear_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    with pytest.raises(DemoError, match="a temporary folder cannot be created"), places(None):
        pass


@pytest.mark.parametrize("server", ["postgresql://bob:s3@cret@h:5432/d", "postgresql://bob:s3%cret@h", "postgresql://"])
def test_a_password_of_postgresql_is_in_no_error(server: str) -> None:
    with pytest.raises(DemoError, match="--server: must be the URL of a PostgreSQL server") as refused:
        DemoConfig(broker="postgres", server=server)
    assert "s3" not in str(refused.value)


@pytest.mark.parametrize("server", ["nats://bob:s3cret@127.0.0.1:99999", "nats://bob:s3 cret@h", "http://u:s3cret@h"])
def test_a_password_is_in_no_error(server: str) -> None:
    with pytest.raises(DemoError) as refused:
        DemoConfig(server=server)
    assert "s3" not in str(refused.value)


def test_a_password_is_in_no_repr() -> None:
    assert "s3cret" not in repr(DemoConfig(server="nats://bob:s3cret@h:1"))
