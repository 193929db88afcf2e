"""One question to a broker: how long an answer is waited for, and why none came. Blocks, with a deadline."""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from typing import Any, Final, TypeVar

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient, ConfigResource, ResourceType

__all__ = ["NOT_ALLOWED", "answer", "cause", "is_login", "is_refused", "settings_of", "wait"]

NOT_ALLOWED: Final = frozenset(
    (
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.GROUP_AUTHORIZATION_FAILED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    )
)

_POLL: Final = 0.05
_LOGIN: Final = frozenset((KafkaError._AUTHENTICATION, KafkaError.SASL_AUTHENTICATION_FAILED))

_T = TypeVar("_T")


def _never() -> bool:
    return False


def wait(
    admin: AdminClient, futures: Collection[Future[_T]], deadline: float, give_up: Callable[[], bool] = _never
) -> bool:
    """Whether all of them are done by ``deadline``, in seconds of ``time.monotonic``. Blocks for no longer, serves the
    client's callbacks meanwhile, and ends at once where ``give_up`` is true."""
    while not all(future.done() for future in futures):
        left = deadline - time.monotonic()
        if left <= 0 or give_up():
            return False
        # Polled, it says what goes wrong meanwhile.
        admin.poll(0)
        concurrent.futures.wait(futures, min(left, _POLL))
    return True


def answer(admin: AdminClient, future: Future[_T], deadline: float, give_up: Callable[[], bool] = _never) -> _T:
    """What comes of one of them; see ``wait``. Raises ``KafkaException``, also when it is too late or given up."""
    done = wait(admin, [future], deadline, give_up)
    # An error is kept for long, with a traceback that knows this call: the client is to end all the same.
    del admin
    if not done:
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT, "no answer in time"))
    return future.result(0)


def settings_of(
    admin: AdminClient, kind: ResourceType, name: str, deadline: float, give_up: Callable[[], bool] = _never
) -> dict[str, str]:
    """The settings of a broker or a topic. Blocks and raises like ``answer``."""
    resource = ConfigResource(kind, name)
    asked: dict[ConfigResource, Future[dict[str, Any]]] = admin.describe_configs(
        [resource], request_timeout=max(_POLL, deadline - time.monotonic())
    )
    found = answer(admin, asked[resource], deadline, give_up)
    return {entry.name: entry.value for entry in found.values() if entry.value is not None}


def is_login(error: KafkaError) -> bool:
    """Whether it is a login that was refused."""
    return error.code() in _LOGIN


def is_refused(told: Sequence[KafkaError]) -> bool:
    """Whether a client that was told these has nothing to wait for: its login was refused."""
    return any(map(is_login, told))


def cause(error: KafkaError, told: Sequence[KafkaError]) -> KafkaError:
    """Why a question ended with ``error``, which may only say that its time is over: ``told`` is what the client was
    told beside it. A login that was refused says most."""
    causes = [one for one in told if one.code() != KafkaError._ALL_BROKERS_DOWN]
    return ([one for one in causes if is_login(one)] or causes or [error])[-1]
