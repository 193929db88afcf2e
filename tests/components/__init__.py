"""The starter of real components, such as Kafka or NATS, for tests and `make run`.

    with components.running("nats") as urls:
        ... urls["nats"] ...

Each component is a class like `NatsServer`, with an entry in `COMPONENTS`. The starter imports only the standard
library. A component listens only on loopback, on free ports. Each component has a separate folder for its files. A
component ends with its owner, even after a kill of the owner.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from tests.components.kafka_server import KafkaServer
from tests.components.nats_server import NatsServer
from tests.components.postgres_server import PostgresServer
from tests.components.supervised import ComponentError, MissingComponent, Supervised
from tests.components.waiting import wait_until

__all__ = [
    "COMPONENTS",
    "Component",
    "ComponentError",
    "KafkaServer",
    "MissingComponent",
    "NatsServer",
    "PostgresServer",
    "Supervised",
    "running",
    "start_all",
    "wait_until",
]


class Component(Protocol):
    """The calls that the starter makes on a component."""

    @property
    def url(self) -> str:
        """The address for clients. Known after `start`."""

    def prepare(self) -> None:
        """Fetch the files of the component. Idempotent; the first call may block for minutes.

        Raises `MissingComponent` if a program is not installed.
        """

    def start(self) -> None:
        """Start the component, and block until it answers. Idempotent."""

    def stop(self) -> None:
        """End the component, remove its folder, and block until both are done. Idempotent."""


COMPONENTS: dict[str, Callable[[], Component]] = {
    "kafka": KafkaServer,
    "nats": NatsServer,
    "postgres": PostgresServer,
}


def start_all(components: Sequence[Component]) -> None:
    """Start the components concurrently, and block until all of them answer. If one start fails, stop every component,
    and raise the error."""
    for component in components:
        component.prepare()  # in this thread, so that a signal ends the call at once
    try:
        with concurrent.futures.ThreadPoolExecutor(max(1, len(components))) as pool:
            for started in [pool.submit(component.start) for component in components]:
                started.result()
    except BaseException:
        for component in components:
            component.stop()
        raise


@contextlib.contextmanager
def running(*names: str) -> Iterator[dict[str, str]]:
    """Run fresh, private components during the block; yields a dictionary from the name of a component to its URL."""
    unknown = [name for name in names if name not in COMPONENTS]
    if unknown:
        raise ComponentError(f"unknown component {unknown[0]!r}: known are {', '.join(COMPONENTS)}")
    components = {name: COMPONENTS[name]() for name in names}
    start_all(list(components.values()))
    try:
        yield {name: component.url for name, component in components.items()}
    finally:
        for component in components.values():
            component.stop()
