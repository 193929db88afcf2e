"""``KafkaBroker`` agrees with a naive model of its clients for random plans."""

from __future__ import annotations

from typing import Final, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memsource.kafka.client import Callback, Client, Commit
from tests.effort import runs
from tests.memsource.kafka.stand import Stand

SESSION: Final = 6.0
PARTITIONS: Final = 3
NAMES: Final = ("a", "b", "c")
ACTIONS: Final = (
    *("poll", "fetch", "release", "pass", "publish", "commit") * 3,
    *("join", "crash", "freeze", "close", "idle", "lose", "rebalance", "pause", "stop", "start", "retention"),
)


class Assignment(NamedTuple):
    """The client and the membership of an assignment."""

    client: Client
    membership: str


class Model:
    """A naive model of the callbacks of every client, and their consequences."""

    def __init__(self, protocol: str) -> None:
        self.stand = Stand(
            PARTITIONS, 4, protocol=protocol, session_timeout=SESSION, max_poll_interval=20.0, prefetch=3
        )
        self.broker = self.stand.broker
        self.clients: dict[str, Client] = {}
        self.committed: dict[int, Commit] = {}
        self.owners: dict[int, Assignment] = {}
        self.next: dict[tuple[Client, int], int] = {}
        self.revoking: set[tuple[Client, int]] = set()
        self.silent: dict[Client, float] = {}
        self.up_since = 0.0
        self.trimmed: dict[int, int] = {}

    def act(self, action: str, which: int, amount: int) -> None:
        client = self.clients.get(NAMES[which])
        partition = amount % PARTITIONS
        stand, broker, now = self.stand, self.broker, self.stand.now
        if action == "join":
            if (client is None or client.crashed or client.closed) and broker.up:
                self.clients[NAMES[which]] = stand.client(NAMES[which])
        elif action == "pass":
            self.elapse((0.1, 0.5, 2.0, 7.0)[amount % 4])
        elif action == "publish":
            broker.publish(partition=partition)
            broker.skip(amount % 2, partition=partition)
        elif action == "lose":
            owner = self.owners.get(partition)
            before = broker.group.owner(partition)
            if broker.lose(partition, now) and owner is not None and owner.membership == before:
                del self.owners[partition]
        elif action == "rebalance":
            broker.rebalance(now)
        elif action == "stop":
            broker.stop_broker(now)
        elif action == "start":
            if not broker.up:
                self.up_since = now
            broker.start_broker(now)
        elif action == "retention":
            end = broker.group.topic.log(partition).end
            self.trimmed[partition] = max(self.trimmed.get(partition, 0), min(amount, end))
            broker.delete_records(partition, min(amount, end), now)
        elif client is not None:
            self.act_of(client, action, amount)
        self.check()

    def act_of(self, client: Client, action: str, amount: int) -> None:
        partition = amount % PARTITIONS
        broker, now = self.broker, self.stand.now
        if action == "poll":
            self.poll(client)
        elif action == "fetch":
            self.fetch(client, partition, 1 + amount % 5)
        elif action == "release":
            self.release(client, partition)
        elif action == "commit":
            known = broker.up and broker.coordinator.knows(client) and not client.crashed
            if (self.stand.commit(client, amount, "x" * amount, partition) is None) != known:
                raise AssertionError(f"a commit of {client!r} was refused or accepted, known: {known}")
            if known:
                self.committed[partition] = Commit(amount, "x" * amount)
        elif action == "crash":
            broker.crash(client.name, now)
            self.silent.setdefault(client, now)
        elif action == "freeze":
            broker.freeze(client.name, now + (1.0, 4.0, 30.0)[amount % 3])
        elif action == "close":
            broker.begin_close(client, now)
            broker.end_close(client, now)
        elif action == "idle":
            broker.polling(client, now, on=amount % 2 == 0)
        elif action == "pause":
            (client.pause if amount % 2 else client.resume)(partition)

    def elapse(self, seconds: float) -> None:
        self.stand.to(self.stand.now + seconds)
        # No due timer is left, or a world would stand still.
        assert self.broker.next_at() > self.stand.now

    def poll(self, client: Client) -> None:
        for event in self.stand.poll(client):
            if not isinstance(event, Callback):
                continue
            if event.kind == "lost" and client.rejoining:
                # All partitions, including those that are being revoked.
                for key in [key for key in self.next if key[0] is client]:
                    del self.next[key]
                    self.revoking.discard(key)
            for partition in event.partitions:
                self.told(client, event.kind, partition)

    def told(self, client: Client, kind: str, partition: int) -> None:
        key = client, partition
        if kind == "assign":
            assert key not in self.next
            former = self.owners.get(partition)
            if former is not None:
                alive = former.membership in self.broker.group.members
                assert not alive, f"{partition} was assigned to {client!r} and is owned by {former.client!r}"
            self.owners[partition] = Assignment(client, client.id)
            self.next[key] = self.begin(partition)
        elif kind == "revoke":
            assert key in self.next
            self.revoking.add(key)
        else:
            self.next.pop(key, None)
            self.revoking.discard(key)
            if partition in self.owners and self.owners[partition] == (client, client.id):
                del self.owners[partition]

    def begin(self, partition: int) -> int:
        start, end = self.trimmed.get(partition, 0), self.broker.group.topic.log(partition).end
        committed = self.committed.get(partition)
        return committed.offset if committed is not None and start <= committed.offset <= end else start

    def fetch(self, client: Client, partition: int, messages: int) -> None:
        key = client, partition
        if key not in self.next or partition not in client.partitions:
            return
        came = self.stand.fetch(client, partition, messages)
        if key in self.revoking or partition in client.paused or not client.running:
            assert came == []
        assert len(came) <= messages
        for position in came:
            assert position >= self.next[key], "no message below the position is delivered"
            log = self.broker.group.topic.log(partition)
            skipped = [other for other in log.positions if self.next[key] <= other < position]
            assert skipped == [], "only messages deleted by retention are skipped"
            self.next[key] = position + 1

    def release(self, client: Client, partition: int) -> None:
        key = client, partition
        if key in self.revoking:
            self.stand.release(client, partition)
            self.revoking.discard(key)
            del self.next[key]
            owner = self.owners.get(partition)
            if owner is not None and owner.client is client:
                del self.owners[partition]

    def check(self) -> None:
        group = self.broker.group
        for partition in self.broker.partitions:
            assert self.broker.committed(partition) == self.committed.get(partition)
            owner = group.owner(partition)
            assert owner is None or owner in group.members
        for client, since in self.silent.items():
            # Outages restart sessions.
            over = self.broker.up and self.stand.now >= max(since, self.up_since) + SESSION
            assert not (over and self.broker.coordinator.knows(client)), "a dead member outlived its session"

    def settle(self) -> None:
        """Without further faults all messages are read."""
        self.act("start", 0, 0)
        self.act("join", 0, 0)
        self.elapse(30.0)
        live = [client for client in self.clients.values() if not client.crashed and not client.closed]
        for client in live:
            self.broker.polling(client, self.stand.now, on=True)
            for partition in range(PARTITIONS):
                client.resume(partition)
        for partition in range(PARTITIONS):
            self.broker.publish(partition=partition)
        for _ in range(12):
            self.elapse(SESSION)
            for client in live:
                for _ in range(4):
                    self.poll(client)
                for partition in range(PARTITIONS):
                    self.release(client, partition)
                    self.fetch(client, partition, 1_000)
        assert None not in self.stand.owners()
        for partition in range(PARTITIONS):
            readers = [self.next[client, partition] for client in live if (client, partition) in self.next]
            assert readers == [self.broker.group.topic.log(partition).end]


@pytest.mark.long
@settings(max_examples=runs(300))
@given(
    st.sampled_from(["eager", "cooperative", "848"]),
    st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 2), st.integers(0, 11)), max_size=60),
)
def test_after_any_events_a_partition_has_one_owner_and_each_message_is_read_once(
    protocol: str, plan: list[tuple[str, int, int]]
) -> None:
    model = Model(protocol)
    for number in range(2):
        model.act("join", number, 0)
    for step in plan:
        model.act(*step)
    model.settle()
