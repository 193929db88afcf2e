"""The settings of one Kafka broker: a whole cluster of one node, on loopback, with groups that form at once."""

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
    # One node holds everything.
    "offsets.topic.num.partitions": "4",
    "offsets.topic.replication.factor": "1",
    "transaction.state.log.num.partitions": "4",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "share.coordinator.state.topic.replication.factor": "1",
    "share.coordinator.state.topic.min.isr": "1",
    # A group begins without waiting for more members, and may have short sessions in either protocol.
    "group.initial.rebalance.delay.ms": "0",
    "group.min.session.timeout.ms": "1000",
    "group.consumer.min.session.timeout.ms": "1000",
    "group.consumer.session.timeout.ms": "6000",
    "group.consumer.min.heartbeat.interval.ms": "200",
    "group.consumer.heartbeat.interval.ms": "500",
    # A killed broker may register again once its predecessor's session is over.
    "broker.session.timeout.ms": "2000",
    "broker.heartbeat.interval.ms": "300",
    # The cleaner's share of a small heap; its default is half of it.
    "log.cleaner.dedupe.buffer.size": "4194304",
}


class Ports(NamedTuple):
    """Where a broker listens. `clients` and `inside` differ only when clients have to log in."""

    clients: int
    inside: int
    controller: int


def choose_ports(*, login: bool) -> Ports:
    """Ports that are free just now."""
    inside, controller = free_port(), free_port()
    return Ports(free_port() if login else inside, inside, controller)


def server_properties(
    data: Path, ports: Ports, users: Mapping[str, str], overrides: Mapping[str, str | int]
) -> dict[str, str]:
    """All settings of a broker that keeps its data in `data`.

    With `users` (passwords by name) clients log in by SASL/PLAIN, and may do what an ACL allows them; `admin` may do
    everything. So may whoever comes by the listener inside, which is the broker's own. ValueError for an override
    of what is said here by other means, and for names and passwords that are more than letters and digits.
    """
    listeners = {"PLAINTEXT": ports.inside}
    own = {**_COMMON, "log.dirs": str(data), "controller.quorum.voters": f"1@{HOST}:{ports.controller}"}
    for name, password in users.items():
        if not (name.isalnum() and password.isalnum()):  # anything else would have to be quoted twice
            raise ValueError(f"user {name!r}: name and password are letters and digits alone here")
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
    """As Java reads them. There are passwords in them, so the file is its owner's alone."""
    path.touch(mode=0o600)
    path.write_text("".join(f"{name}={value}\n" for name, value in properties.items()))


def _login_module(users: Mapping[str, str]) -> str:
    entries = "".join(f' user_{name}="{password}"' for name, password in users.items())
    return f"org.apache.kafka.common.security.plain.PlainLoginModule required{entries};"
