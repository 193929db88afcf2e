"""The Kafka personality in virtual time, for the scripts of ``tests.memsource.kafka.scenarios``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Final

from memsource.kafka.broker import KafkaBroker, KafkaSettings
from memsource.kafka.client import Client, Commit, KafkaFailure, RebalanceProtocol
from tests.memsource.kafka.stage import LIMIT, NEW_MESSAGES, Committed, Hook, Member, Settings

_STEP: Final = 0.05
_LONG: Final = 6.0
_HEARTBEAT: Final = 0.3


class VirtualMember:
    """One client of the personality."""

    def __init__(self, cluster: VirtualCluster, client: Client, on_revoke: Hook | None, on_lost: Hook | None) -> None:
        self.client = client
        self._cluster = cluster
        self._broker = cluster.broker
        self._hooks = {"revoke": on_revoke, "lost": on_lost}
        self._heard: list[str] = []
        self._taken: defaultdict[int, list[int]] = defaultdict(list)

    def heard(self) -> list[str]:
        return list(self._heard)

    def owned(self) -> list[int]:
        return sorted(self.client.partitions)

    def poll(self) -> None:
        cluster, broker, client = self._cluster, self._broker, self.client
        broker.polling(client, cluster.now, on=True)
        while events := broker.poll(client, cluster.now):
            for event in events:
                if isinstance(event, KafkaFailure):
                    self._heard.append(event.code)
                else:
                    self._hear(event.kind, event.partitions)
        for partition in list(client.partitions):
            records = broker.fetch(client, partition, 1_000, 1 << 20)
            self._taken[partition] += [record.position for record in records]
        broker.polling(client, cluster.now, on=False)

    def _hear(self, kind: str, partitions: tuple[int, ...]) -> None:
        if partitions:
            self._heard.append(f"{kind} {len(partitions)}")
        hook = self._hooks.get(kind)
        if hook is not None:
            hook(self)
        if kind == "revoke":
            for partition in partitions:
                self._broker.release(self.client, partition, self._cluster.now)

    def taken(self, partition: int = 0) -> list[int]:
        return self._taken.pop(partition, [])

    def commit(self, *offsets: int, partition: int = 0, metadata: str = "") -> str | None:
        commits = {number: Commit(offset) for number, offset in enumerate(offsets, partition)}
        number, (offset, _) = commits.popitem()
        commits[number] = Commit(offset, metadata)
        try:
            self._broker.commit(self.client, commits, self._cluster.now)
        except KafkaFailure as failure:
            return failure.code
        return None

    def pause(self, partition: int) -> None:
        self.client.pause(partition)

    def resume(self, partition: int) -> None:
        self.client.resume(partition)

    def position(self, partition: int = 0) -> int:
        return self.client.partitions[partition].position

    def close(self) -> None:
        for callback in self._broker.begin_close(self.client, self._cluster.now):
            self._hear(callback.kind, callback.partitions)
        self._broker.end_close(self.client, self._cluster.now)


class VirtualCluster:
    """The personality in virtual time."""

    def __init__(self, protocol: RebalanceProtocol, settings: Settings) -> None:
        self.protocol = protocol
        self.now = 0.0
        self.broker = KafkaBroker(
            settings.partitions,
            settings=KafkaSettings(
                protocol=protocol,
                session_timeout=settings.session or _LONG,
                heartbeat_interval=_HEARTBEAT,
                max_poll_interval=settings.poll_interval,
                offset_reset=settings.reset,
            ),
        )
        self._session = settings.session or _LONG

    def publish(self, count: int, partition: int = 0) -> None:
        for _ in range(count):
            self.broker.publish(partition=partition)

    def transact(self, count: int, partition: int = 0, *, commit: bool = True) -> None:
        if commit:
            self.publish(count, partition)
        self.broker.skip(1 if commit else count + 1, partition=partition)

    def join(
        self, name: str, *, instance: str | None = None, on_revoke: Hook | None = None, on_lost: Hook | None = None
    ) -> VirtualMember:
        client = Client(name, lambda: self.now, instance)
        self.broker.introduce(client)
        self.broker.join(client, self.now)
        return VirtualMember(self, client, on_revoke, on_lost)

    def until(self, condition: Callable[[], bool], *members: Member) -> None:
        deadline = self.now + LIMIT
        while not condition():
            assert self.now < deadline, f"{[member.heard() for member in members]}"
            self._turn(members)

    def wait(self, seconds: float, *members: Member) -> None:
        end = self.now + seconds
        while self.now < end:
            self._turn(members)

    def _turn(self, members: tuple[Member, ...]) -> None:
        for member in members:
            member.poll()
        self.now += _STEP
        self.broker.advance(self.now)

    def committed(self, partition: int = 0) -> Committed | None:
        commit = self.broker.committed(partition)
        return None if commit is None else Committed(*commit)

    def delete_records(self, before: int, partition: int = 0) -> None:
        self.broker.delete_records(partition, before, self.now)

    def delete_topic(self) -> None:
        self.broker.delete_topic(self.now)

    def recreate_topic(self) -> None:
        self.broker.delete_topic(self.now)
        self.broker.create_topic(self.now)
        self.publish(NEW_MESSAGES)

    def freeze(self, member: Member, seconds: float) -> None:
        assert isinstance(member, VirtualMember)
        self.broker.freeze(member.client.name, self.now + seconds)
        self.wait(seconds + _STEP)

    def outage(self, member: Member) -> None:
        self.broker.stop_broker(self.now)
        self.wait(2 * self._session, member)
        self.broker.start_broker(self.now)
