"""What the JetStream API refuses a request with: the server's own numbers, as ``ApiError.err_code`` has them."""

from __future__ import annotations

from typing import Final

CONSUMER_NOT_FOUND: Final = 10014
CONSUMER_NAME_TAKEN: Final = frozenset({10013, 10148})
CONSUMER_NOT_UNIQUE: Final = frozenset({10099, 10100})
"""A work queue has a consumer already that filters some of the same subjects."""
NO_MORE_CONSUMERS: Final = 10026

STREAM_NOT_FOUND: Final = 10059
STREAM_NAME_TAKEN: Final = 10058

MESSAGE_NOT_FOUND: Final = 10037
WRONG_REVISION: Final = frozenset({10071, 10164})
"""The last sequence of a subject is another one than expected."""

NO_JETSTREAM: Final = frozenset({10039, 10076})
"""There is none on the server or for the account, with the same status as what is over in a moment."""
