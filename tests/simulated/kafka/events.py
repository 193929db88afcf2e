"""Events of the simulated Kafka that only some runs have, such as retention, refused permissions and long freezes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextvars import Context
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from memsource.adapters.choices import Choice
from memsource.kafka.client import Client, Code
from memsource.sim.plans.plan import Fault

if TYPE_CHECKING:
    from tests.simulated.kafka.broker import SimulatedKafka
    from tests.simulated.kafka.producer import SimulatedProducer

FORBIDDEN: Final[tuple[Code, ...]] = ("GROUP_AUTHORIZATION_FAILED", "TOPIC_AUTHORIZATION_FAILED")
_FORBIDDEN_FOR: Final = (0.5, 3.0, 12.0)
_FORBIDDEN_WITHIN: Final = 20.0
"""Permissions that are lost, and the seconds until they are given back; and the first seconds of a run in which it
happens without a fault."""

_RETENTIONS: Final = 4
_RETAINED_FOR: Final = 30.0
"""Number of times that retention deletes messages in a run without faults, and the seconds in which it does so."""

_RETAINED_AT_HANDOVERS: Final = 0.7
"""Share of the handed over positions of such a run below which retention deletes the unfinished messages."""

_TOO_FEW_REPLICAS: Final = (0.5, 2.0, 11.0)
"""Seconds for which the topic of the dead letters may have too few replicas; the last one outlasts a write."""

_HINDERED_WITHIN: Final = 12.0
_HINDERED_AFTER: Final = (0.0, 0.0, 0.0015, 0.05)
"""First seconds of a run in which the dead letters are hindered without a fault, and the seconds between a new record
and the event that waited for it: before its request arrives, before the answer, and later."""

_DRAINS_CUT_OFF: Final = 0.5
_CUT_OFF_FOR: Final = (3.0, 6.5, 12.0)
"""Share of the drains of such a run in which the member is cut off, and the seconds."""

_STARTS_CUT_OFF: Final = 0.3
_UNSTARTED_FOR: Final = (6.5, 25.0, 45.0)
"""Share of the assignments of a run with short polls in which the member is cut off, and the seconds, of which the last
ones are longer than the time between two polls."""

_FREEZES: Final = 2
_FROZEN_WITHIN: Final = 25.0
_BEYOND: Final = (0.05, 0.5, 0.5, 2.5, 4.5)
"""Number of freezes of a run without a fault, and the first seconds of the run in which they happen; and the seconds
beyond the limit after which a member asks whether it is still in the group."""

_FREEZES_AGAIN: Final = 0.3
_ANSWERED: Final = 0.0015
"""Share of the questions for the members of the group in whose way back the member freezes once more, and the seconds
from a question to this moment."""

_LOADS: Final = 0.5
_LOADED_AFTER: Final = (0.5, 3.0, 8.0)
"""Share of these freezes after which the coordinator loads the group, and the seconds."""

_LAGS: Final = 0.15
_LAGS_FOR: Final = (10.5, 11.0, 14.0)
_GIVEN_UP: Final = 9.5
_LOST_FOR: Final = 2.0
"""Share of the commits of a run with late commits that arrive late, and the seconds; seconds after which a member may
have repeated such a commit, whose repetition is lost, and after which it learns of this loss."""

_RECREATED_WITHIN: Final = 25.0
_RECREATED_IN_DRAINS: Final = 0.3
_ABSENT: Final = (0.0, 0.0, 0.1, 0.3)
_RECREATIONS: Final = 2
"""First seconds of a run in which the topic is recreated without a fault, and the share of the drains that see it; the
seconds without the topic, and the most recreations of a run."""

_STRAYS_LEADERLESS: Final = 0.5
_LEADERLESS: Final = (0.5, 3.0, 8.0)
"""Share of the deleted positions after which nobody tells the bounds of logs, and the seconds."""

_FORGETS: Final = 0.1
"""Share of the questions of such a run that end neither with an answer nor with an error."""

_EXTRA: Final = 0.6
"""Share of the callbacks of a run with extra events that are such events."""


@dataclass(frozen=True)
class Extras:
    """The events of a run.

    Attributes:
        retains: Whether retention deletes messages, even unread messages and messages below a committed position.
        writes: Whether the members write their dead letters to a topic, by the real writer.
        cuts_drains: Whether the network may cut a member off during its drains.
        forbids: Whether the user of the members loses a permission for some time.
        wakes: Whether members wake from freezes of about a session, and find a coordinator that still loads the group.
        recreates: Whether an operator deletes the topic and creates it again under its name.
        lags: Whether commits arrive after their timeout, while the network loses their repetitions.
        static: Whether the members are static: each process has the instance id of an ended process.
        polls: Whether the maximum time between two polls is little longer than the longest drain.
        deafens: Whether a client that was removed during a freeze gets no answer for some time, as over a connection
            that a router has dropped.
        forgets: Whether clients forget requests, which then have no answer and no error.
    """

    retains: bool = False
    writes: bool = False
    cuts_drains: bool = False
    forbids: bool = False
    wakes: bool = False
    recreates: bool = False
    static: bool = False
    lags: bool = False
    polls: bool = False
    deafens: bool = False
    forgets: bool = False


class Events:
    """The events of one run. No method blocks.

    Args:
        broker: The broker.
        extras: The events that happen.

    Attributes:
        extras: The events that happen.
        leaderless_until: Time until which no broker reports the bounds of logs.
        loading_until: Time until which the coordinator does not list the members of the group.
        too_few_replicas_until: Time until which the topic of the dead letters has too few replicas.
    """

    def __init__(self, broker: SimulatedKafka, extras: Extras) -> None:
        self.extras = extras
        self.leaderless_until = self.loading_until = self.too_few_replicas_until = 0.0
        self._broker = broker
        self._rng = broker.rng
        # The event that waits for a producer with records.
        self._hinders_next: int | None = None
        self._recreations = 0
        self._late: dict[str, tuple[float, float]] = {}  # times at which a late commit was sent, and arrives

    def begin(self) -> None:
        """Plan the events that happen without a fault."""
        rng, loop = self._rng, self._broker.loop
        for _ in range(_RETENTIONS):
            self.retain_while(_RETAINED_FOR)
        if self.extras.forbids:
            loop.call_at(rng.random() * _FORBIDDEN_WITHIN, self._forbid, context=Context())
        for _ in range(_FREEZES if self.extras.wakes else 0):
            at, target = rng.random() * _FROZEN_WITHIN, rng.randrange(8)
            loop.call_at(at, self._freeze, target, context=Context())
        if self.extras.writes:
            at, target = rng.random() * _HINDERED_WITHIN, rng.randrange(8)
            loop.call_at(at, self._hinder_letters, target, context=Context())
        if self.extras.recreates:
            loop.call_at(rng.random() * _RECREATED_WITHIN, self._recreate, context=Context())

    @property
    def recreated(self) -> bool:
        """Whether the topic was recreated."""
        return self._recreations > 0

    def callback(self, target: int) -> bool:
        """Let one event happen instead of a callback, in some cases. Return whether an event has happened."""
        extras, rng = self.extras, self._rng
        if extras.retains and rng.random() < _EXTRA and self._retain():
            return True
        if extras.writes and rng.random() < _EXTRA and self._hinder_letters(target):
            return True
        if extras.forbids and rng.random() < _EXTRA:
            self._forbid()
            return True
        if extras.wakes and rng.random() < _EXTRA and self._freeze(target):
            return True
        return extras.recreates and rng.random() < _EXTRA and self._recreate()

    # --- what the broker and its clients tell

    def on_rebalance(self) -> None:
        """Let markers of transactions arrive before members learn of a rebalance, so that no member has committed the
        markers.
        """
        broker = self._broker
        if self.extras.cuts_drains and broker.coordinator.exists:
            heard = broker.world.now + self._rng.random() * broker.settings.heartbeat_interval
            for number in broker.partitions:
                broker.loop.call_at(heard, partial(broker.skip, 1, partition=number), context=Context())

    def on_drain(self, client: Client) -> None:
        """In some cases of some runs, cut off a client at the begin or commit of its revoke, or recreate its topic."""
        world, rng = self._broker.world, self._rng
        if self.extras.recreates and rng.random() < _RECREATED_IN_DRAINS:
            self._recreate()
        if self.extras.cuts_drains and world.faulty and rng.random() < _DRAINS_CUT_OFF:
            self._broker.isolate(client.name, world.now + rng.choice(_CUT_OFF_FOR), world.now)

    def on_assign(self, client: Client) -> None:
        """In some cases of some runs, cut off a client whose assignment begins."""
        world, rng = self._broker.world, self._rng
        if self.extras.polls and world.faulty and rng.random() < _STARTS_CUT_OFF:
            self._broker.isolate(client.name, world.now + rng.choice(_UNSTARTED_FOR), world.now)

    def on_members_asked(self, member: str) -> None:
        """In some cases, freeze a member beyond its session while the answer about the group is on its way."""
        if self.extras.wakes and self._broker.world.faulty and self._rng.random() < _FREEZES_AGAIN:
            at = self._broker.world.now + _ANSWERED
            self._broker.loop.call_at(at, self._freeze_again, member, context=Context())

    def on_handed_over(self, partition: int, floor: int, completed: Sequence[tuple[int, int]]) -> None:
        """Let retention delete unfinished messages before the next owner starts, in some cases."""
        if self.extras.retains and self._rng.random() < _RETAINED_AT_HANDOVERS:
            before = self._rng.choice([floor + 1, completed[0][0], completed[0][0] + 1, completed[-1][0]])
            at = self._broker.world.now + self._rng.random() * 0.3
            self._broker.loop.call_at(at, self._delete, partition, before, context=Context())

    def commit_fate(self, client: Client) -> Choice | None:
        """The fate of a commit that arrives after its timeout, or that follows such a commit; None = the chooser
        decides.
        """
        world, rng = self._broker.world, self._rng
        if not self.extras.lags or not world.faulty:
            return None
        sent, arrives = self._late.get(client.name, (-math.inf, -math.inf))
        if world.now < arrives:
            return Choice("drop_request", _LOST_FOR) if world.now >= sent + _GIVEN_UP else None
        if rng.random() >= _LAGS:
            return None
        late = rng.choice(_LAGS_FOR)
        self._late[client.name] = world.now, world.now + late
        return Choice("delay", late)

    def forgets(self, member: str) -> bool:
        """Whether a client of a joined member forgets the request that it sends now."""
        if not self.extras.forgets or not self._broker.world.faulty:
            return False
        consumer = self._broker.consumers.get(member)
        return consumer is not None and consumer.running and self._rng.random() < _FORGETS

    def on_stray(self) -> None:
        """In some cases, leave the logs without a leader after a client has learned that its position was deleted."""
        world = self._broker.world
        if world.faulty and self._rng.random() < _STRAYS_LEADERLESS:
            self.leaderless_until = world.now + self._rng.choice(_LEADERLESS)

    def on_letter(self, producer: SimulatedProducer) -> None:
        """Soon after a producer gets a record, let the event happen that waits for a record."""
        if self._hinders_next is not None:
            target, self._hinders_next = self._hinders_next, None
            at = self._broker.world.now + self._rng.choice(_HINDERED_AFTER)
            self._broker.loop.call_at(at, self._hinder, producer, target, context=Context())

    def retain_while(self, until: float) -> None:
        """Let retention delete messages until about a time, before hindered members have read them."""
        if self.extras.retains:
            now = self._broker.world.now
            at = now + self._rng.random() * (until - now)
            self._broker.loop.call_at(at, self._retain, context=Context())

    # --- events

    def _forbid(self) -> None:
        """Take a permission away for some time."""
        world = self._broker.world
        if world.faulty:
            self._broker.forbid(self._rng.choice(FORBIDDEN), world.now + self._rng.choice(_FORBIDDEN_FOR))

    def _freeze(self, target: int) -> bool:
        """Freeze a member with partitions until about the end of its session. Return False without such a member."""
        broker, world = self._broker, self._broker.world
        owning = [
            each
            for each in world.members
            if not (each.gone or each.ended.is_set()) and broker.client_of(each.name).partitions
        ]
        if not owning or not world.faulty:
            return False
        seconds = self._beyond()
        if self._rng.random() < _LOADS:
            self.loading_until = world.now + seconds + self._rng.choice(_LOADED_AFTER)
        world.perform(Fault(0, "freeze", 0, seconds), owning[target % len(owning)])
        return True

    def _freeze_again(self, member: str) -> None:
        world = self._broker.world
        worker = next((each for each in world.members if each.name == member and not each.gone), None)
        if worker is not None and world.faulty:
            world.perform(Fault(0, "freeze", 0, self._beyond()), worker)

    def _beyond(self) -> float:
        """Seconds of a freeze after which a member checks its membership of the group."""
        settings = self._broker.settings
        return settings.session_timeout - settings.heartbeat_interval - 1.0 + self._rng.choice(_BEYOND)

    def _hinder_letters(self, target: int) -> bool:
        """Hinder a producer that has records, or the next producer that gets a record.

        Returns False if the event waits for a record.
        """
        broker = self._broker
        loaded = [each for each in broker.producers if each.loaded and not broker.client_of(each.member).crashed]
        if loaded:
            self._hinder(loaded[target % len(loaded)], target)
        else:
            self._hinders_next = target
        return bool(loaded)

    def _hinder(self, producer: SimulatedProducer, target: int) -> None:
        """Let a producer fail, or leave the topic of the dead letters with too few replicas."""
        world = self._broker.world
        if not world.faulty:
            return
        if target % 2:
            producer.on_fatal()
        else:
            self.too_few_replicas_until = world.now + self._rng.choice(_TOO_FEW_REPLICAS)

    def _recreate(self) -> bool:
        """Delete the topic, and create it again soon. Return False if the run has reached its limit of recreations."""
        broker, world = self._broker, self._broker.world
        if self._recreations == _RECREATIONS or not world.faulty or not broker.coordinator.exists:
            return False
        self._recreations += 1
        broker.delete_topic(world.now)
        absent = self._rng.choice(_ABSENT)
        if absent:
            broker.loop.call_at(world.now + absent, lambda: broker.create_topic(world.now), context=Context())
        else:
            broker.create_topic(world.now)
        return True

    def _delete(self, partition: int, before: int) -> None:
        broker = self._broker
        if broker.log_start(partition) < before <= broker.group.topic.log(partition).end:
            broker.delete_records(partition, before, broker.world.now)

    def _retain(self) -> bool:
        """Delete the first messages of a partition, up to a critical position. Return whether a message was deleted."""
        broker, ends = self._broker, list[tuple[int, int]]()
        for number in broker.partitions:
            start, end = broker.log_start(number), broker.group.topic.log(number).end
            committed, _ = broker.group.committed(number)
            read = [each.partitions[number] for each in broker.introduced if number in each.partitions]
            known = {
                end,
                end - 1,
                committed + 1,
                *(each.position + 1 for each in read),
                *(each.fetched for each in read),
            }
            ends += [(number, before) for before in sorted(known) if start < before <= end]
        if not ends:
            return False
        broker.delete_records(*self._rng.choice(ends), broker.world.now)
        return True
