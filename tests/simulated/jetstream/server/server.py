"""A nats-server: its connections, its routing of messages, and JetStream behind some subjects."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Final, Literal

from memsource.memory.topic import Record
from tests.simulated.jetstream.server.api import PREFIX, Api
from tests.simulated.jetstream.server.bucket import BucketStream
from tests.simulated.jetstream.server.protocol import (
    Other,
    Parser,
    Publish,
    Subscribe,
    Unsubscribe,
    denial,
    info,
    matches,
    message,
    status_block,
)
from tests.simulated.jetstream.server.stream import MessageStream, Refused, Sent, Status, StreamConsumer

_JS: Final = "$JS."
_ACK: Final = "$JS.ACK."
_NEXT: Final = f"{PREFIX}CONSUMER.MSG.NEXT."
_KV: Final = "$KV."

_NO_RESPONDERS: Final = status_block(503)

_NO_LEADER: Final = json.dumps(
    {"error": {"code": 503, "err_code": 10008, "description": "JetStream system temporarily unavailable"}}
).encode()


@dataclass(frozen=True, slots=True)
class Fate:
    """The fate of a client's message at the server.

    Attributes:
        kind: ``"deliver"``, ``"delay"`` by ``seconds``, ``"delay_reply"`` with an effect now and an answer after
            ``seconds``, ``"drop_request"`` without an effect, ``"drop_reply"`` with an effect and without an answer, or
            ``"duplicate"``. A lost reply to a pull request loses the next message of the request.
        seconds: Delay, in seconds.
    """

    kind: Literal["deliver", "delay", "delay_reply", "drop_request", "drop_reply", "duplicate"] = "deliver"
    seconds: float = 0.0


DELIVER: Final = Fate()


class Session:
    """The server's side of one connection.

    Args:
        server: The server.
        number: Number of the connection.
        member: Name of the client, for the faults.
        send: Function that receives the bytes for the client.
        closed: Function to call when the server ends the connection.

    Attributes:
        number: Number of the connection.
        member: Name of the client.
        open: Whether the connection is open from the server's view.
        denied: Patterns of subjects to which the client may not publish.
    """

    def __init__(
        self,
        server: NatsServer,
        number: int,
        member: str,
        send: Callable[[bytes], None],
        closed: Callable[[], None],
    ) -> None:
        self.number = number
        self.member = member
        self.open = True
        self.denied: list[str] = []
        self._server = server
        self._parser = Parser()
        self._subscriptions: dict[int, str] = {}
        self._limits: dict[int, int] = {}
        self._send = send
        self._closed = closed
        send(info(server.version, number))

    def receive(self, data: bytes, now: float) -> None:
        """Perform the commands in the bytes of the client. The call does nothing after the end of the connection."""
        for command in self._parser.feed(data):
            if not self.open:
                return
            if isinstance(command, Publish):
                self._server.receive(self, command, now)
            elif isinstance(command, Subscribe):
                self._subscriptions[command.sid] = command.pattern
            elif isinstance(command, Unsubscribe):
                self._unsubscribe(command)
            elif isinstance(command, Other) and command.name == "PING":
                self._send(b"PONG\r\n")

    def _unsubscribe(self, command: Unsubscribe) -> None:
        if command.limit:
            self._limits[command.sid] = command.limit
            return
        self._subscriptions.pop(command.sid, None)
        self._server.forget_unheard()

    def hears(self, subject: str) -> list[int]:
        """Return the subscriptions whose pattern matches a subject."""
        return [sid for sid, pattern in self._subscriptions.items() if matches(pattern, subject)]

    def deliver(self, sid: int, data: bytes) -> None:
        """Send a message to a subscription."""
        self._send(data)
        left = self._limits.get(sid)
        if left is not None:
            self._limits[sid] = left - 1
            if left <= 1:
                self._subscriptions.pop(sid, None)

    def deny(self, subject: str) -> None:
        """Tell the client that it may not publish to a subject."""
        self._send(denial(subject))

    def end(self) -> None:
        """End the connection by the server. Idempotent."""
        if self.open:
            self.lose()
            self._closed()

    def lose(self) -> None:
        """Record that the client has ended the connection. Idempotent."""
        if self.open:
            self.open = False
            self._subscriptions.clear()
            self._server.forget(self)


class NatsServer:
    """A server with one account. The server acts only during calls of its methods, and ``now`` never falls.

    Args:
        fate: Function that returns the fate of each message of a client.
        loses: Function that returns whether the server loses a delivery. The arguments of the function are the name of
            the client, and the reply subject of the pull request.
        on_denied: Function to call with the connection, the subject and the time of each message that the server has
            denied.
        version: Version that the server reports.
        seed: Seed of the delays of expiries.

    Attributes:
        version: Version that the server reports.
        api: The streams.
        sessions: The connections.
        up: Whether the server runs.
        leaderless: Streams and buckets without a leader, with the time at which they have a leader again.
        denied: Patterns of subjects to which no client may publish.
        acknowledged: Consumer and sequence of each message whose acknowledgement the consumer has read.
    """

    def __init__(
        self,
        fate: Callable[[Session, Publish], Fate] = lambda session, command: DELIVER,
        *,
        loses: Callable[[str, str], bool] = lambda member, reply: False,
        on_denied: Callable[[Session, str, float], None] = lambda session, subject, now: None,
        version: str = "2.12.1",
        seed: int = 0,
    ) -> None:
        self.version = version
        self.api = Api(self._tell, seed)
        self.sessions: list[Session] = []
        self.up = True
        self.leaderless: dict[str, float] = {}
        self._fate = fate
        self._loses = loses
        self._on_denied = on_denied
        self.denied: list[str] = []
        self.acknowledged: set[tuple[str, int]] = set()
        self._connections = 0
        self._later: list[tuple[float, int, Callable[[float], None]]] = []
        self._scheduled = 0
        self._lost: set[str] = set()  # reply subjects of pull requests whose next message is lost
        self._late: dict[str, float] = {}  # times of the answers that are delayed, by reply subject
        self._silent: set[str] = set()  # streams without a leader whose servers do not answer requests

    # --- connections

    def connect(self, member: str, send: Callable[[bytes], None], closed: Callable[[], None]) -> Session:
        """Accept a connection. The server must run.

        Args:
            member: Name of the client, for the faults.
            send: Function that receives the bytes for the client.
            closed: Function to call when the server ends the connection.

        Returns:
            The connection, as the server sees the connection.
        """
        self._connections += 1
        session = Session(self, self._connections, member, send, closed)
        self.sessions.append(session)
        return session

    def forget(self, session: Session) -> None:
        """Remove a connection that has ended."""
        self.sessions.remove(session)
        self.forget_unheard()

    def forget_unheard(self) -> None:
        """Drop the pull requests whose subject has no subscription."""
        for _, consumer in self._consumers():
            consumer.drop(self._heard)

    def _heard(self, subject: str) -> bool:
        return any(session.hears(subject) for session in self.sessions)

    # --- messages of clients

    def receive(self, session: Session, command: Publish, now: float) -> None:
        """Perform a message of a client, unless the server loses the message."""
        if (session.denied or self.denied) and self._is_denied(session, command.subject):
            session.deny(command.subject)
            self._on_denied(session, command.subject, now)
            return
        fate = self._fate(session, command)
        if fate.kind == "drop_request":
            return
        if fate.kind == "delay":
            self.later(now + fate.seconds, lambda at: self._perform(command, at))
            return
        if fate.kind == "delay_reply" and command.reply:
            self._late[command.reply] = now + fate.seconds
        elif fate.kind == "drop_reply":
            if command.subject.startswith(_NEXT):
                self._lost.add(command.reply)
            else:
                command = command._replace(reply="")
        self._perform(command, now)
        if fate.kind == "duplicate":
            self._perform(command, now)

    def _is_denied(self, session: Session, subject: str) -> bool:
        return any(matches(pattern, subject) for pattern in (*session.denied, *self.denied))

    def _perform(self, command: Publish, now: float) -> None:
        if not self.up:
            return
        subject = command.subject
        # No client subscribes to the requests of JetStream itself.
        heard = not subject.startswith(_JS) and self._route(subject, command.reply, command.payload)
        if subject.startswith(_NEXT):
            self._ask(command, now)
        elif subject.startswith(PREFIX):
            self._request(command, now)
        elif subject.startswith(_ACK):
            self._acknowledge(command, now)
        elif subject.startswith(_KV):
            self._put(command, now)
        elif not self._store(command, now) and not heard:
            self._unanswered(command.reply)

    def _route(self, subject: str, reply: str, payload: bytes, headers: bytes = b"", shown: str = "") -> bool:
        """Send a message to all subscriptions of a subject. Returns whether a subscription exists."""
        heard = False
        for session in list(self.sessions):
            for sid in session.hears(subject):
                heard = True
                session.deliver(sid, message(shown or subject, sid, reply, payload, headers))
        return heard

    def _unanswered(self, reply: str) -> None:
        self._reply(reply, b"", _NO_RESPONDERS)

    def _reply(self, reply: str, payload: bytes, headers: bytes = b"") -> None:
        at = self._late.pop(reply, None)
        if at is not None:
            self.later(at, lambda _: self._reply(reply, payload, headers))
        elif reply and self.up:
            self._route(reply, "", payload, headers)

    # --- JetStream

    def _request(self, command: Publish, now: float) -> None:
        request = command.subject.removeprefix(PREFIX)
        words = request.split(".")
        name = words[2] if words[:2] != ["STREAM", "MSG"] and len(words) > 2 else words[-1]
        if name in self.leaderless:
            if name not in self._silent:
                self._reply(command.reply, _NO_LEADER)
            return
        answer = self.api.answer(request, command.payload, now)
        self._reply(command.reply, json.dumps(answer).encode())
        if words[0] == "CONSUMER" and words[1] in ("CREATE", "RESET"):
            self.pump(now)

    def _stream_of(self, name: str) -> MessageStream | None:
        return None if name in self.leaderless else self.api.streams.get(name)

    def _ask(self, command: Publish, now: float) -> None:
        stream, _, name = command.subject.removeprefix(_NEXT).partition(".")
        found = self._stream_of(stream)
        consumer = None if found is None else found.consumers.get(name)
        if consumer is None:
            self._unanswered(command.reply)
            return
        if self._heard(command.reply):
            consumer.ask(command.reply, json.loads(command.payload), now)
            self._pump(consumer, now)

    def _acknowledge(self, command: Publish, now: float) -> None:
        words = command.subject.split(".")
        stream = self._stream_of(words[2])
        consumer = None if stream is None else stream.consumers.get(words[3])
        if stream is None or consumer is None:
            self._unanswered(command.reply)
            return
        sequence, body = int(words[5]), command.payload
        if body in (b"+ACK", b""):
            self.acknowledged.add((consumer.name, sequence))
            stream.ack(consumer, sequence, now)
        elif body == b"+WPI":
            consumer.data.extend(sequence, now)
        elif body.startswith(b"-NAK"):
            delay = json.loads(body[4:])["delay"] / 1e9 if body[4:] else 0.0
            consumer.data.nak(sequence, now, delay)
        self._reply(command.reply, b"")
        self._pump(consumer, now)

    def _put(self, command: Publish, now: float) -> None:
        name = f"KV_{command.subject.split('.')[1]}"
        bucket = None if name in self.leaderless else self.api.buckets.get(name)
        if bucket is None:
            self._unanswered(command.reply)
            return
        try:
            revision = bucket.put(command.subject, command.headers, command.payload, now)
            answer: dict[str, object] = {"stream": name, "seq": revision}
        except Refused as refused:
            answer = {"stream": name, "seq": 0, "error": refused.fields}
        self._reply(command.reply, json.dumps(answer).encode())

    def _store(self, command: Publish, now: float) -> bool:
        """Store a message of a client. Returns False if no stream stores its subject."""
        for stream in self.api.streams.values():
            if stream.name not in self.leaderless and any(
                matches(each, command.subject) for each in stream.config.get("subjects") or ()
            ):
                answer: dict[str, object] = {"stream": stream.name}
                copied = stream.copied(command.headers.get("Nats-Msg-Id", ""), now)
                if copied is not None:
                    answer |= {"seq": copied, "duplicate": True}
                else:
                    answer["seq"] = stream.log.end
                    headers = tuple((name, value.encode()) for name, value in command.headers.items())
                    record = Record(0, stream.log.end, None, command.payload, headers, command.subject)
                    self.append(stream.name, record, now)
                self._reply(command.reply, json.dumps(answer).encode())
                return True
        return False

    # --- deliveries

    def append(self, stream: str, record: Record, now: float) -> None:
        """Store a message of a producer, and deliver it."""
        self.api.streams[stream].append(record)
        self.pump(now)

    def pump(self, now: float) -> None:
        """Deliver messages to all pull requests that wait."""
        for _, consumer in self._consumers():
            self._pump(consumer, now)

    def _pump(self, consumer: StreamConsumer, now: float) -> None:
        if not self.up or consumer.stream in self.leaderless:
            return
        for each in consumer.deliver(now, self.api.nanoseconds):
            if isinstance(each, Status):
                self._tell(each)
            elif self._send(consumer, each):
                consumer.sent[each.delivery] = each.reply
            else:
                consumer.sent.pop(each.delivery, None)

    def _send(self, consumer: StreamConsumer, sent: Sent) -> bool:
        """Send a message to the pull request. Returns False if the delivery is lost."""
        if consumer.losing:
            consumer.losing -= 1
            return False
        if sent.reply in self._lost:
            self._lost.remove(sent.reply)
            return False
        receiver = next((each.member for each in self.sessions if each.hears(sent.reply)), None)
        if receiver is not None and self._loses(receiver, sent.reply):
            return False
        return self._route(sent.reply, sent.answer, sent.record.value, shown=sent.record.subject)

    def _tell(self, status: Status) -> None:
        self._route(status.reply, "", b"", status_block(status.status, status.text, **status.fields))

    def _consumers(self) -> Iterator[tuple[MessageStream, StreamConsumer]]:
        for stream in self.api.streams.values():
            for consumer in list(stream.consumers.values()):
                yield stream, consumer

    # --- faults

    def stop(self) -> None:
        """Kill the server. The server ends all connections. Idempotent."""
        self.up = False
        for session in list(self.sessions):
            session.end()

    def start(self, now: float) -> None:
        """Start the server again. The consumers have forgotten the changes of the last 0.1 s before the kill."""
        self.up = True
        for stream in self.api.streams.values():
            stream.kill(now)

    def lose_leader(self, name: str, until: float, now: float, *, silent: bool = True) -> bool:
        """Leave a stream or bucket without a leader until a time.

        Args:
            name: Name of the stream.
            until: Time of the next leader, in seconds.
            now: The time, in seconds.
            silent: Whether the server answers no request meanwhile, and ends pull requests by a status. False = the
                server answers with the error of a missing leader, and pull requests vanish, as after the death of a
                machine.

        Returns:
            False if the stream already has no leader.
        """
        if name in self.leaderless:
            return False
        self.leaderless[name] = until
        self._silent.discard(name)
        if silent:
            self._silent.add(name)
        stream = self.api.streams.get(name)
        for consumer in () if stream is None else stream.consumers.values():
            for status in consumer.end(409, "Leadership Change"):
                if silent:
                    self._tell(status)
        return True

    def end_requests(self, consumer: StreamConsumer, text: str) -> bool:
        """End the pull requests of a consumer by the status 409. Returns False if no request waits."""
        ended = consumer.end(409, text)
        for status in ended:
            self._tell(status)
        return bool(ended)

    def delete_consumer(self, stream: str, name: str) -> bool:
        """Delete a consumer, as an operator does. Returns False if the consumer does not exist."""
        return "error" not in self.api.answer(f"CONSUMER.DELETE.{stream}.{name}", b"", 0.0)

    def lose_bucket(self, bucket: BucketStream) -> None:
        """Delete a bucket, as an operator does. Idempotent."""
        self.api.buckets.pop(bucket.name, None)

    # --- time

    def later(self, at: float, act: Callable[[float], None]) -> None:
        """Schedule an action. Actions for the same time run in the order of their scheduling."""
        self._scheduled += 1
        heappush(self._later, (at, self._scheduled, act))

    def next_at(self) -> float:
        """Return the time of the next due action; infinity = no action is due."""
        at = [consumer.next_at() for _, consumer in self._consumers()]
        at += [bucket.data.next_at() for bucket in self.api.buckets.values()]
        at += self.leaderless.values()
        return min([*at, self._later[0][0]] if self._later else at, default=math.inf)

    def advance(self, now: float) -> None:
        """Act on every due timer."""
        while self._later and self._later[0][0] <= now:
            heappop(self._later)[2](now)
        for name in [name for name, until in self.leaderless.items() if until <= now]:
            del self.leaderless[name]
        for bucket in self.api.buckets.values():
            bucket.data.advance(now)
        for _, consumer in self._consumers():
            if consumer.next_at() <= now:
                for status in consumer.advance(now):
                    self._tell(status)
            self._pump(consumer, now)
