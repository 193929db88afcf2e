"""Error codes of the JetStream API, which ``ApiError.err_code`` contains."""

from __future__ import annotations

from typing import Final

CONSUMER_NOT_FOUND: Final = 10014
CONSUMER_NAME_TAKEN: Final = frozenset({10013, 10148})
CONSUMER_NOT_UNIQUE: Final = frozenset({10099, 10100})
"""A work queue already has a consumer that filters some of the same subjects."""

NO_MORE_CONSUMERS: Final = 10026

NOT_CREATED: Final = frozenset({10012, 10049, 10104})
"""The server failed to create a consumer or a stream, for example because a file was briefly missing. The server also
refuses some configurations with these codes.
"""

STREAM_NOT_FOUND: Final = 10059
STREAM_NAME_TAKEN: Final = 10058

NO_LEADER: Final = 10008
"""The cluster has no leader at present, for itself or for a stream."""

MESSAGE_NOT_FOUND: Final = frozenset({10037, 10043})
WRONG_REVISION: Final = frozenset({10071, 10164})
"""The last sequence of a subject differs from the expected sequence."""

NO_JETSTREAM: Final = frozenset({10039, 10076})
"""JetStream is off on the server or for the account. The answer has the HTTP status of a temporary error."""
