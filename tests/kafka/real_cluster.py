"""A real broker and plain clients, as scripts of ``tests.memsource.kafka.scenarios`` use them."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from multiprocessing import get_context
from multiprocessing.managers import BaseManager
from typing import Any, Final, cast

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

from memsource.kafka.client import RebalanceProtocol
from tests.components import KafkaServer
from tests.kafka.workload import QUIET, Topic, produce
from tests.memsource.kafka.stage import LIMIT, NEW_MESSAGES, Committed, Hook, Member, Settings

_PROTOCOLS: Final[dict[RebalanceProtocol, dict[str, Any]]] = {
    "eager": {"partition.assignment.strategy": "range"},
    "cooperative": {"partition.assignment.strategy": "cooperative-sticky"},
    "848": {"group.protocol": "consumer"},
}
_HEARTBEAT: Final = 300
_LONG: Final = 6.0
_POLL: Final = 0.02


class RealMember:
    """One client of librdkafka, in the thread of its caller or in another process."""

    def __init__(
        self, config: dict[str, Any], topic: str, on_revoke: Hook | None = None, on_lost: Hook | None = None
    ) -> None:
        self._topic = topic
        self._heard: list[str] = []
        self._taken: defaultdict[int, list[int]] = defaultdict(list)
        self._closed = False
        self._consumer = Consumer(config)
        self._consumer.subscribe(
            [topic],
            on_assign=self._hears("assign", None),
            on_revoke=self._hears("revoke", on_revoke),
            on_lost=self._hears("lost", on_lost),
        )

    def _hears(self, kind: str, hook: Hook | None) -> Callable[[Consumer, list[TopicPartition]], None]:
        def hear(_: Consumer, partitions: list[TopicPartition]) -> None:
            if partitions:
                self._heard.append(f"{kind} {len(partitions)}")
            if hook is not None:
                hook(self)

        return hear

    def heard(self) -> list[str]:
        return list(self._heard)

    def owned(self) -> list[int]:
        return sorted(each.partition for each in self._consumer.assignment())

    def poll(self) -> None:
        for message in self._consumer.consume(1_000, _POLL):
            error, partition, offset = message.error(), message.partition(), message.offset()
            if error is not None:
                self._heard.append(error.name())
            else:
                assert partition is not None and offset is not None
                self._taken[partition].append(offset)

    def taken(self, partition: int = 0) -> list[int]:
        return self._taken.pop(partition, [])

    def commit(self, *offsets: int, partition: int = 0, metadata: str = "") -> str | None:
        last = partition + len(offsets) - 1
        wanted = [
            TopicPartition(self._topic, number, offset, metadata if number == last else "")
            for number, offset in enumerate(offsets, partition)
        ]
        try:
            answered = self._consumer.commit(offsets=wanted, asynchronous=False)
        except KafkaException as failure:
            error: KafkaError = failure.args[0]
            return error.name()
        return next((each.error.name() for each in answered or () if each.error is not None), None)

    def pause(self, partition: int) -> None:
        self._consumer.pause([TopicPartition(self._topic, partition)])

    def resume(self, partition: int) -> None:
        self._consumer.resume([TopicPartition(self._topic, partition)])

    def position(self, partition: int = 0) -> int:
        (found,) = self._consumer.position([TopicPartition(self._topic, partition)])
        return found.offset

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._consumer.close()

    def process(self) -> int:
        """The id of its process."""
        return os.getpid()


class _Apart(BaseManager):
    """A process with one member."""


_Apart.register("member", RealMember)


class RealCluster:
    """A topic and a group. ``server``: a private broker, for a test that kills it."""

    def __init__(
        self, topic: Topic, protocol: RebalanceProtocol, settings: Settings, server: KafkaServer | None = None
    ) -> None:
        self.protocol = protocol
        self._topic = topic
        self._settings = settings
        self._server = server
        self._group = f"g-{topic.name}"
        self._members: list[Member] = []
        self._ends = ExitStack()
        self._outsider = Consumer({**QUIET, "bootstrap.servers": topic.url, "group.id": self._group})
        self._ends.callback(self._outsider.close)
        if protocol == "848" and settings.session is not None:
            self._shorten_sessions(settings.session)

    def _shorten_sessions(self, session: float) -> None:
        entries = [
            ConfigEntry(f"consumer.{name}.ms", str(value), incremental_operation=AlterConfigOpType.SET)
            for name, value in (("session.timeout", int(session * 1000)), ("heartbeat.interval", _HEARTBEAT))
        ]
        group = ConfigResource(ResourceType.GROUP, self._group, incremental_configs=entries)
        self._topic.admin.incremental_alter_configs([group])[group].result(LIMIT)

    def __enter__(self) -> RealCluster:
        return self

    def __exit__(self, *_: object) -> None:
        for member in self._members:
            self._ends.callback(member.close)
        self._ends.close()

    def publish(self, count: int, partition: int = 0) -> None:
        produce(self._topic, count, partition=partition)

    def transact(self, count: int, partition: int = 0, *, commit: bool = True) -> None:
        producer = Producer({**QUIET, "bootstrap.servers": self._topic.url, "transactional.id": self._group})
        producer.init_transactions(LIMIT)
        producer.begin_transaction()
        for _ in range(count):
            producer.produce(self._topic.name, b"", partition=partition)
        # Flushed first: records that were not sent leave no trace when they are aborted.
        assert not producer.flush(LIMIT)
        (producer.commit_transaction if commit else producer.abort_transaction)(LIMIT)

    def join(
        self, name: str, *, instance: str | None = None, on_revoke: Hook | None = None, on_lost: Hook | None = None
    ) -> Member:
        settings = self._settings
        config: dict[str, Any] = {
            **QUIET,
            **_PROTOCOLS[self.protocol],
            "bootstrap.servers": self._topic.url,
            "group.id": self._group,
            "client.id": name,
            "enable.auto.commit": False,
            "auto.offset.reset": settings.reset,
            "max.poll.interval.ms": int(settings.poll_interval * 1000),
            "topic.metadata.refresh.interval.ms": int(settings.refresh * 1000),
            "fetch.wait.max.ms": 50,
            "reconnect.backoff.max.ms": 200,
        }
        if self.protocol != "848":
            session = int((settings.session or _LONG) * 1000)
            config |= {"session.timeout.ms": session, "heartbeat.interval.ms": _HEARTBEAT}
        if instance is not None:
            config["group.instance.id"] = instance
        if settings.apart:
            member = self._join_apart(config)
        else:
            member = RealMember(config, self._topic.name, on_revoke, on_lost)
        self._members.append(member)
        return member

    def _join_apart(self, config: dict[str, Any]) -> Member:
        manager = _Apart(ctx=get_context("spawn"))
        manager.start()
        self._ends.callback(manager.shutdown)
        return cast("Member", manager.member(config, self._topic.name))  # type: ignore[attr-defined]

    def until(self, condition: Callable[[], bool], *members: Member) -> None:
        deadline = time.monotonic() + LIMIT
        while not condition():
            assert time.monotonic() < deadline, f"{[member.heard() for member in members]}"
            self._turn(members)

    def wait(self, seconds: float, *members: Member) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._turn(members)

    def _turn(self, members: Sequence[Member]) -> None:
        for member in members:
            member.poll()
        if not members:
            time.sleep(_POLL)

    def committed(self, partition: int = 0) -> Committed | None:
        (found,) = self._outsider.committed([TopicPartition(self._topic.name, partition)], timeout=LIMIT)
        return None if found.offset < 0 else Committed(found.offset, found.metadata or "")

    def delete_records(self, before: int, partition: int = 0) -> None:
        place = TopicPartition(self._topic.name, partition, before)
        self._topic.admin.delete_records([place])[place].result(LIMIT)

    def delete_topic(self) -> None:
        self._topic.delete()

    def recreate_topic(self) -> None:
        self._topic.delete()
        while True:
            try:
                self._topic.create()
                break
            except KafkaException as failure:
                if failure.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                    raise
        self.publish(NEW_MESSAGES)

    def freeze(self, member: Member, seconds: float) -> None:
        pid = cast("RealMember", member).process()
        os.kill(pid, signal.SIGSTOP)
        try:
            time.sleep(seconds)
        finally:
            os.kill(pid, signal.SIGCONT)

    def outage(self, member: Member) -> None:
        assert self._server is not None
        self._server.kill()
        start = threading.Thread(target=self._server.start)
        start.start()
        while start.is_alive():
            member.poll()
        start.join()
