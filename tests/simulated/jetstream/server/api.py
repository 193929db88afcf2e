"""The requests of the JetStream API to streams, buckets and consumers, and their answers as JSON."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Final

from memsource.jetstream.epoch_consumers import EPOCH_MS
from memsource.memory.topic import Record
from tests.simulated.jetstream.server.bucket import BucketStream
from tests.simulated.jetstream.server.stream import MessageStream, Refused, Status, StreamConsumer, overlap

PREFIX: Final = "$JS.API."

_LEVEL: Final = 1
"""Level of the API: nats-server 2.11, which has message TTLs."""

_PAGE: Final = 1024

Fields = dict[str, Any]


class Api:
    """The streams of a server, and the requests about them. No method blocks.

    Args:
        tell: Function that sends a status to a pull request.
        seed: Seed of the delays of expiries.

    Attributes:
        streams: The streams of messages by name.
        buckets: The streams of buckets by name.
        set_back: Seconds by which a test has set the server's clock back.
    """

    def __init__(self, tell: Callable[[Status], None], seed: int) -> None:
        self.streams: dict[str, MessageStream] = {}
        self.buckets: dict[str, BucketStream] = {}
        self.set_back = 0.0
        self._tell = tell
        self._seed = seed

    def answer(self, request: str, payload: bytes, now: float) -> Fields:
        """Perform a request.

        Args:
            request: Subject of the request without ``PREFIX``.
            payload: Fields of the request as JSON; empty = none.
            now: The time, in seconds.

        Returns:
            The fields of the answer.
        """
        try:
            fields = json.loads(payload) if payload else {}
            return self._answer(request.split("."), fields, now)
        except Refused as refused:
            return {"error": refused.fields}

    def _answer(self, words: list[str], fields: Fields, now: float) -> Fields:
        match words:
            case ["INFO"]:
                return {"memory": 0, "storage": 0, "api": {"level": _LEVEL, "total": 1, "errors": 0}}
            case ["STREAM", "INFO", name]:
                return self._stream_info(name, fields, now)
            case ["STREAM", "CREATE", name]:
                return self._create_stream(name, fields, now)
            case ["STREAM", "DELETE", name]:
                return self._delete_stream(name)
            case ["STREAM", "NAMES"]:
                subject = fields.get("subject")
                found = {name: stream.config for name, stream in self.streams.items()}
                found |= {name: bucket.config for name, bucket in self.buckets.items()}
                names = sorted(name for name, config in found.items() if subject is None or _stores(config, subject))
                return {"total": len(names), "offset": 0, "limit": _PAGE, "streams": names}
            case ["STREAM", "MSG", "GET", name]:
                return {"message": self._message(name, fields, now)}
            case ["STREAM", "MSG", "DELETE", name]:
                if not self._stream(name).remove(int(fields["seq"]), now):
                    raise Refused(400, 10043, "no message found")
                return {"success": True}
            case ["CONSUMER", "CREATE", stream, name, *_]:
                return self._create_consumer(self._stream(stream), name, fields, now)
            case ["CONSUMER", "INFO", stream, name]:
                return self.described(self._consumer(stream, name), now)
            case ["CONSUMER", "RESET", stream, name]:
                consumer = self._consumer(stream, name)
                for sequence in self._stream(stream).gone:
                    consumer.data.remove(sequence, now)
                consumer.reset(now)
                return self.described(consumer, now)
            case ["CONSUMER", "DELETE", stream, name]:
                return self._delete_consumer(self._stream(stream), name)
            case ["CONSUMER", "NAMES", stream]:
                return _page(list(self._stream(stream).consumers), fields)
            case ["CONSUMER", "LIST", stream]:
                return _page([self.described(each, now) for each in self._stream(stream).consumers.values()], fields)
        raise ValueError(
            f"the request {'.'.join(words)} is unknown: this server answers only the requests of lanes_jetstream"
        )

    # --- streams

    def _stream(self, name: str) -> MessageStream:
        if name not in self.streams:
            raise Refused(404, 10059, "stream not found")
        return self.streams[name]

    def _stream_info(self, name: str, fields: Fields, now: float) -> Fields:
        pattern = fields.get("subjects_filter")
        found = self.buckets.get(name) or self._stream(name)
        state: Fields
        if isinstance(found, BucketStream):
            state = found.state(now, pattern)
        else:
            state = dict(found.state())
            if pattern is not None:
                state["subjects"] = found.subjects(pattern)
        answer: Fields = {
            "config": found.config,
            "created": self.stamp(found.created),
            "state": state,
            "ts": self.stamp(now),
        }
        if pattern is not None:
            # The page has all subjects, and a client that asks for the next page receives none.
            offset = int(fields.get("offset", 0))
            answer |= {"total": len(state["subjects"]), "offset": offset, "limit": 100_000}
            state["subjects"] = state["subjects"] if not offset else None
        return answer

    def _create_stream(self, name: str, config: Fields, now: float) -> Fields:
        config = {"retention": "limits", "storage": "file", **config}
        if name in self.streams or name in self.buckets:
            there = self.streams.get(name) or self.buckets[name]
            if there.config != config:
                raise Refused(400, 10058, "stream name already in use with a different configuration")
        elif name.startswith("KV_"):
            self._seed += 1
            self.buckets[name] = BucketStream(config, now, self._seed)
        else:
            self.streams[name] = MessageStream(config, now)
        return {**self._stream_info(name, {}, now), "did_create": True}

    def _delete_stream(self, name: str) -> Fields:
        if self.buckets.pop(name, None) is None:
            stream = self._stream(name)
            for consumer in list(stream.consumers):
                self._delete_consumer(stream, consumer)
            del self.streams[name]
        return {"success": True}

    def _message(self, name: str, fields: Fields, now: float) -> Fields:
        bucket = self.buckets.get(name)
        if bucket is not None:
            return {**bucket.get(str(fields["last_by_subj"]), now), "time": self.stamp(now)}
        stream = self._stream(name)
        sequence = int(fields["seq"])
        record = stream.next(sequence, fields.get("next_by_subj") or ">")
        if record is None or ("next_by_subj" not in fields and record.position != sequence):
            raise Refused(404, 10037, "no message found")
        return {**_stored(record), "time": self.stamp(now)}

    # --- consumers

    def _consumer(self, stream: str, name: str) -> StreamConsumer:
        found = self._stream(stream).consumers.get(name)
        if found is None:
            raise Refused(404, 10014, "consumer not found")
        return found

    def _create_consumer(self, stream: MessageStream, name: str, fields: Fields, now: float) -> Fields:
        config, action = fields["config"], fields.get("action", "")
        there = stream.consumers.get(name)
        if action == "update":
            if there is None:
                raise Refused(400, 10149, "consumer does not exist")
            there.update(config, now)
            return self.described(there, now)
        return self.described(stream.create(name, config, now), now)

    def _delete_consumer(self, stream: MessageStream, name: str) -> Fields:
        ended = stream.delete(name)
        if ended is None:
            raise Refused(404, 10014, "consumer not found")
        for status in ended:
            self._tell(status)
        return {"success": True}

    def described(self, consumer: StreamConsumer, now: float) -> Fields:
        """Return the server's description of a consumer."""
        data = consumer.data
        number, sequence = data.floor
        return {
            "stream_name": consumer.stream,
            "name": consumer.name,
            "created": self.stamp(consumer.created),
            "config": consumer.config,
            "delivered": {"consumer_seq": data.deliveries, "stream_seq": data.highest},
            "ack_floor": {"consumer_seq": number, "stream_seq": sequence},
            "num_ack_pending": len(data.unacknowledged),
            "num_redelivered": data.redelivered,
            "num_waiting": len(consumer.requests),
            "num_pending": data.undelivered,
            "ts": self.stamp(now),
        }

    # --- the clock of the server

    def nanoseconds(self, now: float) -> int:
        """Return the server's clock in nanoseconds since 1970."""
        return EPOCH_MS * 1_000_000 + int((now - self.set_back) * 1e9)

    def stamp(self, now: float) -> str:
        """Return the server's clock as text."""
        return _text(self.nanoseconds(now))


@lru_cache(maxsize=1024)
def _text(nanoseconds: int) -> str:
    at = datetime.fromtimestamp(nanoseconds / 1e9, UTC)
    return at.isoformat(timespec="microseconds").replace("+00:00", "Z")


def _stores(config: Fields, subject: str) -> bool:
    return any(overlap(each, subject) for each in config.get("subjects") or ())


def _page(entries: list[Any], fields: Mapping[str, Any]) -> Fields:
    offset = int(fields.get("offset", 0))
    shown = entries[offset : offset + _PAGE]
    return {"total": len(entries), "offset": offset, "limit": _PAGE, "consumers": shown or None}


def _stored(record: Record) -> Fields:
    return {"subject": record.subject, "seq": record.position, "data": base64.b64encode(record.value).decode()}
