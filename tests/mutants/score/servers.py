"""The PostgreSQL server that the tests of all children share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests import conftest
from tests.components import PostgresServer


class SharedPostgres(PostgresServer):
    """A server whose ``start`` and ``stop`` have no effect in forked children of the process that made the object."""

    def __init__(self) -> None:
        super().__init__()
        self._owner = os.getpid()

    def start(self) -> None:
        """Start the server, unless this process is a child."""
        if os.getpid() == self._owner:
            super().start()

    def stop(self) -> None:
        """End the server, unless this process is a child."""
        if os.getpid() == self._owner:
            super().stop()

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Start the server, and let the fixture ``postgres`` of each child return it. At the end, stop the server."""
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(conftest, "PostgresServer", lambda: self)
            try:
                self.start()
                yield
            finally:
                self.stop()
