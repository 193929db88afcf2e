"""A NATS client that sends no credentials in clear text to a server of a ``tls://`` URL."""

from __future__ import annotations

from typing import Any

import nats.errors
from nats.aio.client import Client


class NoTls(nats.errors.Error):
    """Error: a server of a ``tls://`` URL offers no TLS, so the client would send the credentials in clear text."""

    def __str__(self) -> str:
        return "nats: the server offers no TLS"


class SecureClient(Client):
    """A client that uses TLS for each server of a ``tls://`` URL. nats-py uses TLS only if the server requires it."""

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        # nats-py calls this method before it decides about TLS and sends the credentials.
        of_tls = self._current_server is not None and self._current_server.uri.scheme == "tls"
        if initial_connection and of_tls and not info.get("tls_required"):
            if not info.get("tls_available"):
                raise NoTls
            # nats-py reads this field for the names of discovered servers, and then upgrades the connection to TLS.
            info["tls_required"] = True
        await super()._process_info(info, initial_connection)
