"""The settings of one Kafka broker: a cluster of one node, on loopback, whose groups form at once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from tests.components.ports import free_port

HOST = "127.0.0.1"
CLUSTER_ID = "bGFuZXMtdGVzdC1rYWZrYQ"  # 16 bytes, base64

_COMMON: Mapping[str, str] = {
    "process.roles": "broker,controller",
    "node.id": "1",
    "controller.listener.names": "CONTROLLER",
}

_DEFAULTS: Mapping[str, str] = {
    "num.partitions": "4",
    "auto.create.topics.enable": "false",
    # One node holds all copies.
    "offsets.topic.num.partitions": "4",
    "offsets.topic.replication.factor": "1",
    "transaction.state.log.num.partitions": "4",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "share.coordinator.state.topic.replication.factor": "1",
    "share.coordinator.state.topic.min.isr": "1",
    # A group forms without a wait for more members. Both protocols allow short sessions.
    "group.initial.rebalance.delay.ms": "0",
    "group.min.session.timeout.ms": "1000",
    "group.consumer.min.session.timeout.ms": "1000",
    "group.consumer.session.timeout.ms": "6000",
    "group.consumer.min.heartbeat.interval.ms": "200",
    "group.consumer.heartbeat.interval.ms": "500",
    # A restarted broker can register only after the session of the killed broker has ended.
    "broker.session.timeout.ms": "2000",
    "broker.heartbeat.interval.ms": "600",
    # An idle broker would write an empty record twice a second.
    "metadata.max.idle.interval.ms": "0",
    # The buffer of the log cleaner; the default is half of the small heap.
    "log.cleaner.dedupe.buffer.size": "4194304",
}


class Ports(NamedTuple):
    """The ports of a broker. `clients` differs from `inside` only if clients must log in."""

    clients: int
    inside: int
    controller: int


def choose_ports(*, login: bool) -> Ports:
    """Return ports that are free at the time of the call."""
    inside, controller = free_port(), free_port()
    return Ports(free_port() if login else inside, inside, controller)


def server_properties(
    data: Path, ports: Ports, users: Mapping[str, str], overrides: Mapping[str, str | int]
) -> dict[str, str]:
    """Return all settings of a broker that keeps its data in `data`.

    `users` maps names to passwords. With `users`, clients log in by SASL/PLAIN, and an ACL must allow each operation.
    The user `admin` may do everything, and so may every client of the port `inside`.

    Raises `ValueError` for an override of a fixed setting, and for a name or password with other characters than
    letters and digits.
    """
    listeners = {"PLAINTEXT": ports.inside}
    own = {**_COMMON, "log.dirs": str(data), "controller.quorum.voters": f"1@{HOST}:{ports.controller}"}
    for name, password in users.items():
        if not (name.isalnum() and password.isalnum()):  # other characters would need double quoting
            raise ValueError(f"user {name!r}: the name and the password may only contain letters and digits")
    if users:
        listeners["CLIENTS"] = ports.clients
        own |= {
            "sasl.enabled.mechanisms": "PLAIN",
            "listener.name.clients.plain.sasl.jaas.config": _login_module(users),
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": "User:ANONYMOUS;User:admin",
        }
    own |= {
        "listeners": ",".join(
            f"{name}://{HOST}:{port}" for name, port in {**listeners, "CONTROLLER": ports.controller}.items()
        ),
        "advertised.listeners": ",".join(f"{name}://{HOST}:{port}" for name, port in listeners.items()),
        "inter.broker.listener.name": "PLAINTEXT",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,CLIENTS:SASL_PLAINTEXT",
    }
    for name in overrides:
        if name in own:
            raise ValueError(f"property {name} is set by the starter and cannot be overridden: leave it out")
    return {**_DEFAULTS, **{name: str(value) for name, value in overrides.items()}, **own}


def write_properties(path: Path, properties: Mapping[str, str]) -> None:
    """Write a properties file for Java. The file may hold passwords, so only its owner can read it."""
    path.touch(mode=0o600)
    path.write_text("".join(f"{name}={value}\n" for name, value in properties.items()))


def _login_module(users: Mapping[str, str]) -> str:
    entries = "".join(f' user_{name}="{password}"' for name, password in users.items())
    return f"org.apache.kafka.common.security.plain.PlainLoginModule required{entries};"
