"""Scripts of the behaviour of a JetStream pull consumer, for the personality and for a real server.

A script observes (sequence, number of deliveries), in the order of arrival.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Final, NamedTuple, Protocol

from memsource.jetstream.pull_consumer import ConsumerSettings, PullConsumer
from memsource.memory.topic import Topic

PATIENCE: Final = 0.4
"""Seconds after which an unfilled pull request ends."""

Arrived = list[tuple[int, int]]


class Cluster(Protocol):
    """A server with one stream, one durable on it, and one client. All times are in seconds."""

    async def publish(self, count: int) -> None:
        """Publish messages."""

    async def pull(self, count: int) -> Arrived:
        """Wait up to ``PATIENCE`` for ``count`` messages; returns the received ones."""

    async def ack(self, *sequences: int, old: bool = False) -> None:
        """Acknowledge the newest delivery of each message, or with ``old`` its first delivery."""

    async def nak(self, *sequences: int, delay: float = 0.0) -> None:
        """Reject the messages, so that the server delivers them again."""

    async def extend(self, sequence: int) -> None:
        """Report the messages as in progress."""

    async def wait(self, seconds: float) -> None:
        """Let time pass."""

    async def reset(self) -> None:
        """Reset the consumer to its ack floor."""

    async def set_ack_wait(self, seconds: float) -> None:
        """Change the consumer's ``ack_wait``."""

    async def kill_server(self) -> None:
        """Kill the server with -9, start it again, and wait until it answers."""


class ModelCluster:
    """The personality, in virtual time."""

    def __init__(self, settings: ConsumerSettings) -> None:
        self.now = 0.0
        self._topic = Topic(1, "model")
        self._topic.skip(1)
        self.consumer = PullConsumer(self._topic.log(0), settings)

    async def publish(self, count: int) -> None:
        for _ in range(count):
            self._topic.publish()

    async def pull(self, count: int) -> Arrived:
        arrived: Arrived = []
        end = self.now + PATIENCE
        while True:
            for each in self.consumer.pull(count - len(arrived), 1 << 20, self.now):
                arrived.append((each.record.position, each.count))
            if len(arrived) == count or self.consumer.next_at() > end:
                break
            self.now = max(self.now, self.consumer.next_at())
            self.consumer.advance(self.now)
        if len(arrived) < count:
            self.now = end
        return arrived

    async def ack(self, *sequences: int, old: bool = False) -> None:
        for sequence in sequences:
            self.consumer.ack(sequence, self.now)

    async def nak(self, *sequences: int, delay: float = 0.0) -> None:
        for sequence in sequences:
            self.consumer.nak(sequence, self.now, delay)

    async def extend(self, sequence: int) -> None:
        self.consumer.extend(sequence, self.now)

    async def wait(self, seconds: float) -> None:
        self.now += seconds
        self.consumer.advance(self.now)

    async def reset(self) -> None:
        self.consumer.reset(self.now)

    async def set_ack_wait(self, seconds: float) -> None:
        self.consumer.configure(replace(self.consumer.settings, ack_wait=seconds), self.now)

    async def kill_server(self) -> None:
        self.consumer.kill(self.now)


Play = Callable[[Cluster], Awaitable[list[Arrived]]]


class Scenario(NamedTuple):
    """A script, its consumer, and the expected observations. ``kills``: the script needs a separate server."""

    play: Play
    settings: ConsumerSettings
    expected: list[Arrived]
    kills: bool = False

    def __str__(self) -> str:
        return self.play.__name__


SCENARIOS: Final[list[Scenario]] = []


def _times(count: int, *sequences: int) -> Arrived:
    return [(sequence, count) for sequence in sequences]


def _scenario(settings: ConsumerSettings, *expected: Arrived, kills: bool = False) -> Callable[[Play], Play]:
    def register(play: Play) -> Play:
        SCENARIOS.append(Scenario(play, settings, list(expected), kills))
        return play

    return register


_SECOND = ConsumerSettings(ack_wait=1.0)
_LONG = ConsumerSettings(ack_wait=30.0)


@_scenario(_SECOND, _times(1, 11, 12, 13, 14, 15), _times(2, *range(1, 11)))
async def a_restart_before_ack_wait_gets_new_messages_first(cluster: Cluster) -> list[Arrived]:
    await cluster.publish(10)
    await cluster.pull(10)
    await cluster.publish(5)
    new = await cluster.pull(5)
    await cluster.ack(*range(11, 16))
    await cluster.wait(1.3)
    return [new, await cluster.pull(10)]


@_scenario(_SECOND, _times(2, *range(1, 11)) + _times(1, *range(11, 16)))
async def a_restart_after_ack_wait_gets_the_orphans_first(cluster: Cluster) -> list[Arrived]:
    await cluster.publish(10)
    await cluster.pull(10)
    await cluster.publish(5)
    await cluster.wait(1.4)
    return [await cluster.pull(15)]


@_scenario(replace(_SECOND, max_ack_pending=10), [], _times(2, *range(1, 11)), _times(1, 11, 12, 13))
async def max_ack_pending_holds_up_new_messages_only(cluster: Cluster) -> list[Arrived]:
    await cluster.publish(10)
    await cluster.pull(10)
    await cluster.publish(5)
    nothing = await cluster.pull(5)
    await cluster.wait(1.0)
    again = await cluster.pull(10)
    await cluster.ack(1, 2, 3)
    return [nothing, again, await cluster.pull(3)]


@_scenario(_SECOND, _times(2, 1, 3, 4, 6, 8, 9, 10) + _times(1, 11))
async def what_is_acknowledged_does_not_come_again(cluster: Cluster) -> list[Arrived]:
    await cluster.publish(11)
    await cluster.pull(10)
    await cluster.ack(2, 5, 7)
    await cluster.wait(1.4)
    return [await cluster.pull(8)]


@_scenario(replace(_SECOND, ack_wait=2.0), _times(2, 2, 3, 4, 5), _times(2, 1))
async def in_progress_on_the_head_alone_reorders(cluster: Cluster) -> list[Arrived]:
    await cluster.publish(5)
    await cluster.pull(5)
    await cluster.wait(1.2)
    await cluster.extend(1)
    await cluster.wait(1.2)
    rest = await cluster.pull(4)
    await cluster.wait(1.2)
    return [rest, await cluster.pull(1)]


@_scenario(_LONG, _times(2, 2) + _times(1, 6, 7))
async def a_nak_comes_behind_what_was_delivered_meanwhile(cluster: Cluster) -> list[Arrived]:
    await cluster.publish(10)
    await cluster.pull(5)
    await cluster.nak(2)
    return [await cluster.pull(3)]


@_scenario(_LONG, _times(2, 5, 3, 4) + _times(1, 6), _times(3, 3))
async def naks_come_in_the_order_of_the_naks(cluster: Cluster) -> list[Arrived]:
    await cluster.publish(6)
    await cluster.pull(5)
    await cluster.nak(5, 3, 4, 3)
    again = await cluster.pull(4)
    await cluster.nak(3)
    return [again, await cluster.pull(1)]


@_scenario(_LONG, _times(1, 4, 5), _times(2, 1) + _times(1, 6))
async def a_nak_with_a_delay_comes_behind_newer_messages(cluster: Cluster) -> list[Arrived]:
    await cluster.publish(6)
    await cluster.pull(3)
    await cluster.nak(1, delay=0.8)
    new = await cluster.pull(2)
    await cluster.wait(1.2)
    return [new, await cluster.pull(2)]


@_scenario(_SECOND, _times(2, 1, 2, 3), _times(3, 2, 3))
async def a_late_acknowledgement_of_an_old_delivery_counts(cluster: Cluster) -> list[Arrived]:
    await cluster.publish(3)
    await cluster.pull(3)
    await cluster.wait(1.4)
    again = await cluster.pull(3)
    await cluster.ack(1, old=True)
    await cluster.wait(1.4)
    return [again, await cluster.pull(3)]


@_scenario(_SECOND, _times(2, 1, 3))
async def an_acknowledgement_takes_an_expired_message_out_of_the_queue(cluster: Cluster) -> list[Arrived]:
    await cluster.publish(3)
    await cluster.pull(3)
    await cluster.wait(1.4)
    await cluster.ack(2)
    return [await cluster.pull(3)]


@_scenario(replace(_SECOND, ack_wait=2.0), _times(2, 1, 2))
async def in_progress_does_not_call_an_expired_message_back(cluster: Cluster) -> list[Arrived]:
    await cluster.publish(2)
    await cluster.pull(2)
    await cluster.wait(2.4)
    await cluster.extend(1)
    return [await cluster.pull(2)]


@_scenario(replace(_SECOND, max_deliver=2), _times(2, 1, 2, 3), [], _times(1, 4))
async def max_deliver_drops_without_a_word(cluster: Cluster) -> list[Arrived]:
    await cluster.publish(3)
    await cluster.pull(3)
    await cluster.wait(1.4)
    again = await cluster.pull(3)
    await cluster.wait(1.4)
    nothing = await cluster.pull(1)
    await cluster.publish(1)
    return [again, nothing, await cluster.pull(1)]


@_scenario(replace(_LONG, max_deliver=2), _times(2, 1), _times(1, 3))
async def a_nak_beyond_max_deliver_drops_too(cluster: Cluster) -> list[Arrived]:
    await cluster.publish(3)
    await cluster.pull(2)
    await cluster.nak(1)
    again = await cluster.pull(1)
    await cluster.nak(1)
    return [again, await cluster.pull(2)]


@_scenario(ConsumerSettings(ack_wait=0.6, backoff=(0.6, 2.0)), _times(2, 1, 2), [], _times(3, 1, 2))
async def backoff_takes_the_place_of_ack_wait(cluster: Cluster) -> list[Arrived]:
    await cluster.publish(2)
    await cluster.pull(2)
    await cluster.wait(0.9)
    second = await cluster.pull(2)
    await cluster.wait(0.9)
    nothing = await cluster.pull(1)
    await cluster.wait(1.1)
    return [second, nothing, await cluster.pull(2)]


@_scenario(_LONG, _times(1, 2, 3, 4, 5, 6))
async def a_reset_begins_behind_the_ack_floor(cluster: Cluster) -> list[Arrived]:
    await cluster.publish(6)
    await cluster.pull(5)
    await cluster.nak(4)
    await cluster.ack(1, 3)
    await cluster.reset()
    return [await cluster.pull(5)]


@_scenario(_SECOND, _times(1, 1), _times(1, 2, 3, 4), _times(2, 1, 2, 3))
async def after_a_reset_old_acknowledgements_count_only_for_what_was_delivered_again(cluster: Cluster) -> list[Arrived]:
    await cluster.publish(4)
    await cluster.pull(4)
    await cluster.reset()
    first = await cluster.pull(1)
    await cluster.ack(3, old=True)
    rest = await cluster.pull(3)
    await cluster.ack(4, old=True)
    await cluster.wait(1.4)
    return [first, rest, await cluster.pull(4)]


@_scenario(_LONG, _times(2, 1, 3, 4, 5, 6) + _times(1, 7, 8))
async def shrinking_ack_wait_brings_all_orphans_first(cluster: Cluster) -> list[Arrived]:
    await cluster.publish(6)
    await cluster.pull(6)
    await cluster.ack(2)
    await cluster.publish(2)
    await cluster.set_ack_wait(0.001)
    await cluster.wait(0.5)
    await cluster.set_ack_wait(30.0)
    return [await cluster.pull(7)]


@_scenario(_LONG, _times(2, 5, 3, 1, 2, 4, 6))
async def shrinking_ack_wait_queues_behind_what_is_queued(cluster: Cluster) -> list[Arrived]:
    await cluster.publish(6)
    await cluster.pull(6)
    await cluster.nak(5, 3)
    await cluster.set_ack_wait(0.001)
    await cluster.wait(0.5)
    await cluster.set_ack_wait(30.0)
    return [await cluster.pull(6)]


@_scenario(replace(_LONG, ack_wait=6.0), _times(1, 7, 8, 9, 10), _times(2, 1, 4, 5, 6), kills=True)
async def a_killed_server_has_lost_its_queue(cluster: Cluster) -> list[Arrived]:
    await cluster.publish(10)
    await cluster.pull(6)
    await cluster.ack(2, 3)
    await cluster.nak(5, 4)
    # Changes older than 0.1 s are on disk.
    await cluster.wait(1.0)
    await cluster.kill_server()
    new = await cluster.pull(4)
    await cluster.ack(7, 8, 9, 10)
    await cluster.wait(6.5)
    return [new, await cluster.pull(4)]
