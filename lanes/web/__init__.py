"""The HTTP server of a consumer: probes, status, metrics and a live page.

Reading order: ``settings``, ``board`` (the snapshot that the event loop makes), ``values`` (its JSON), ``metrics``,
``lines`` (lines of the log), ``commands`` (commands of an operator), ``routes`` (the answers), ``switching`` (short
turns of the threads during a request), ``port`` (the thread that serves the routes), ``opening`` (the check of the
extra for the modules that need it). Three other files in this folder contain the page.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from lanes.web.settings import Web

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from lanes.consumer import Consumer

__all__ = ["Web", "app"]


def app(
    consumer: Consumer,
    *,
    show_keys: bool = False,
    hosts: Collection[str] = (),
    operate: bool = False,
    token: str | None = None,
) -> Starlette:
    """Return the routes of the HTTP server as an ASGI application, to mount in an application such as FastAPI.

    The call does not block. A request never waits long for the event loop of the consumer, even if another loop serves
    the application. ``/metrics`` needs a ``MeterProvider`` of your program with a reader for Prometheus.

    Args:
        consumer: The consumer that your application runs.
        show_keys: Whether the page and ``/status`` show the keys of messages. False = only the hashes of the keys.
        hosts: Names of the hosts by which browsers may open the page, in addition to loopback; see ``Web``.
        operate: Whether a person with the token may pause, resume, unblock and send to the dead letters.
        token: Secret of the person, at least 16 characters.

    Returns:
        The application, with the page at ``/`` and the routes ``/live``, ``/ready``, ``/status`` and ``/metrics``.

    Raises:
        ConfigError: An argument has a wrong type, or the extra ``web`` is not installed.
    """
    from lanes.web.opening import application

    return application(consumer, show_keys=show_keys, hosts=hosts, operate=operate, token=token)
