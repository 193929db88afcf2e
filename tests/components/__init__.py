"""One starter for the real components that tests and `make run` need.

    with components.running("nats") as urls:
        ... urls["nats"] ...

Each component is a class like `NatsServer`, entered in `COMPONENTS`. Nothing here needs more than the standard
library. Components listen on loopback alone, on free ports, keep their files in one folder
each, and end with their owner, however that ends.
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
    """What the starter asks of every component."""

    @property
    def url(self) -> str:
        """Where clients connect. Known once started."""

    def prepare(self) -> None:
        """Have what it runs from. Blocks, minutes when that is fetched first; MissingComponent without. Idempotent."""

    def start(self) -> None:
        """Block until it answers. Idempotent."""

    def stop(self) -> None:
        """Block until it is gone, folder included. Idempotent."""


COMPONENTS: dict[str, Callable[[], Component]] = {
    "kafka": KafkaServer,
    "nats": NatsServer,
    "postgres": PostgresServer,
}


def start_all(components: Sequence[Component]) -> None:
    """Start them side by side and block until all answer. When one fails, all are stopped and it is said."""
    for component in components:
        component.prepare()  # here and not in a thread of the pool: a signal then ends it at once
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
    """Have these components running, fresh and private, while the block runs; yields their URLs by name."""
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
