"""librdkafka's own mock cluster, for errors of single requests that no real broker makes on demand.

The Python client does not expose it, so this module calls the loaded library by its public C interface. A wrong
signature crashes the process; all signatures are here.
"""

from __future__ import annotations

import ctypes
import ctypes.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import confluent_kafka

OFFSET_COMMIT = 8
"""The number of the request OffsetCommit."""

OFFSET_FETCH = 9
"""The number of the request OffsetFetch."""

_PRODUCER = 0
_BROKER = 1


class MockCluster:
    """A cluster of one broker in this process, at ``url``. It keeps nothing."""

    def __init__(self, library: ctypes.CDLL, handle: Any, cluster: Any) -> None:
        self.url: str = library.rd_kafka_mock_cluster_bootstraps(cluster).decode()
        self._library = library
        self._handle = handle
        self._cluster = cluster

    def create(self, topic: str, partitions: int) -> None:
        code = self._library.rd_kafka_mock_topic_create(self._cluster, topic.encode(), partitions, 1)
        assert code == 0, f"topic {topic} was refused with {code}"

    def fail(self, request: int, codes: Sequence[int]) -> None:
        """Answer the next requests of this kind with these errors, in turn."""
        array = (ctypes.c_int * len(codes))(*codes)
        self._library.rd_kafka_mock_push_request_errors_array(self._cluster, request, len(codes), array)

    def offer(self, request: int, low: int, high: int) -> None:
        """Support only these versions of requests of this kind; -1 = no version."""
        code = self._library.rd_kafka_mock_set_apiversion(self._cluster, request, low, high)
        assert code == 0, f"the versions of request {request} were refused with {code}"

    def calm(self, request: int) -> None:
        """Answer all requests of this kind again."""
        self._library.rd_kafka_mock_clear_request_errors(self._cluster, request)

    def end(self) -> None:
        self._library.rd_kafka_mock_cluster_destroy(self._cluster)
        self._library.rd_kafka_destroy(self._handle)


@contextmanager
def mock_cluster() -> Iterator[MockCluster]:
    """A mock cluster whose groups form at once, and with short heartbeats for 848."""
    library = _library()
    error = ctypes.create_string_buffer(512)
    handle = library.rd_kafka_new(_PRODUCER, library.rd_kafka_conf_new(), error, len(error))
    assert handle, error.value.decode()
    cluster = library.rd_kafka_mock_cluster_new(handle, 1)
    assert cluster, "the mock cluster does not start"
    library.rd_kafka_mock_group_initial_rebalance_delay_ms(cluster, 0)
    library.rd_kafka_mock_set_group_consumer_heartbeat_interval_ms(cluster, 100)
    # Admin clients get no answer without a controller.
    library.rd_kafka_mock_set_controller_id(cluster, _BROKER)
    made = MockCluster(library, handle, cluster)
    try:
        yield made
    finally:
        made.end()


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(_path())
    pointer, text, number = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int
    for name, result, arguments in (
        ("conf_new", pointer, ()),
        ("new", pointer, (number, pointer, text, ctypes.c_size_t)),
        ("destroy", None, (pointer,)),
        ("mock_cluster_new", pointer, (pointer, number)),
        ("mock_cluster_destroy", None, (pointer,)),
        ("mock_cluster_bootstraps", text, (pointer,)),
        ("mock_group_initial_rebalance_delay_ms", None, (pointer, ctypes.c_int32)),
        ("mock_set_group_consumer_heartbeat_interval_ms", None, (pointer, number)),
        ("mock_set_controller_id", None, (pointer, ctypes.c_int32)),
        ("mock_topic_create", number, (pointer, text, number, number)),
        (
            "mock_push_request_errors_array",
            None,
            (pointer, ctypes.c_int16, ctypes.c_size_t, ctypes.POINTER(number)),
        ),
        ("mock_set_apiversion", number, (pointer, ctypes.c_int16, ctypes.c_int16, ctypes.c_int16)),
        ("mock_clear_request_errors", None, (pointer, ctypes.c_int16)),
    ):
        function = getattr(library, f"rd_kafka_{name}")
        function.restype, function.argtypes = result, arguments
    return library


def _path() -> str:
    """The path of the library that the client has loaded: its own, or that of the system."""
    package = Path(confluent_kafka.__file__).parent
    for folder in (package.parent / "confluent_kafka.libs", package / ".dylibs"):
        for found in sorted(folder.glob("librdkafka*")):
            return str(found)
    found_elsewhere = ctypes.util.find_library("rdkafka")
    assert found_elsewhere is not None, "cannot find the library of the client"
    return found_elsewhere
