"""The thread that owns a client and makes all calls to the client. A call could block the event loop for seconds.

The event loop sends demands and commands, and receives events and answers. Inside a call to the client, the thread
waits for the loop only in a revocation, until the drain has ended. The thread serves demands and commands between two
calls of ``consume``. Each call of ``consume`` waits for at most ``POLL`` seconds. If no message and no command has
arrived for a while, each call waits for at most ``IDLE_POLL`` seconds.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka import Message as Raw
from confluent_kafka.admin import AdminClient

from lanes.clock import Clock
from lanes.core.offset_map import LIMIT
from lanes.core.types import Settlement
from lanes.errors import SourceError
from lanes.line_limit import OutageLog
from lanes.queues.partitioned import PartitionedQueue
from lanes.source import Assigned, Delivered, Outage, SourceEvent
from lanes_kafka.bridge import Answer, Bridge
from lanes_kafka.callbacks import CallbackError
from lanes_kafka.client.commits import Commit, Commits, TopicIdCheck, metadata_room
from lanes_kafka.client.group import Group
from lanes_kafka.client.group_snapshot import GroupSnapshot, Snapshots
from lanes_kafka.client.growth import GrowthWatch, OnGrowth
from lanes_kafka.client.intake import Intake, partition_id_of
from lanes_kafka.client.key_watch import KeyWatch
from lanes_kafka.client.lag import EndOffsets, isolation_of
from lanes_kafka.client.last_callbacks import serve_last_callbacks
from lanes_kafka.client.mailbox import Close, Command, Confirm, Demand, Expire, Mailbox, Release
from lanes_kafka.client.membership import Membership, Session, SessionWatch, session_of
from lanes_kafka.client.prefetch import Credit
from lanes_kafka.client.queue_watch import QueueWatch
from lanes_kafka.client.read_rest import ReadRest
from lanes_kafka.client.rebuilds import Rebuilds
from lanes_kafka.client.records import KeyFunction, offset_of
from lanes_kafka.client.retention import LogRetention
from lanes_kafka.client.topics import Topics
from lanes_kafka.client_log import ClientLog
from lanes_kafka.config import ClientConfig
from lanes_kafka.errors import ErrorLog, client_message, exception_text, fatal_error, is_permanent, startup_error

log = logging.getLogger("lanes.kafka")

POLL: Final = 0.02
"""Maximum seconds that one call to the client waits for messages. A command waits for the end of this call."""

IDLE_POLL: Final = 0.2
"""Maximum seconds that one call to an idle client waits for messages. The longer wait saves CPU."""

IDLE_AFTER: Final = 2.0
"""Seconds without a message or a command after which the client is idle."""

BATCH: Final = 1_000
"""Maximum number of messages that one call reads."""

PAUSE_AFTER: Final = 1.0
"""Seconds without room after which the thread pauses the client, to poll the client without messages. A pause discards
fetched messages and costs a third of a second."""

OPEN_TIMEOUT: Final = 10.0
"""Seconds allowed for the broker to describe the topics at the start."""

_TOPIC_ID_TIMEOUT: Final = 1.0
"""Seconds that the handling of a position out of range waits for the ids of the topics."""

_ANSWER_POLL: Final = 0.005
"""Seconds that the thread waits between two polls while commits wait for answers or topic ids."""

_READ_PAST_FOR: Final = 0.5
"""Seconds allowed for reads past the last messages of all partitions whose release runs outside of callbacks."""

_HOUSEKEEPING_EVERY: Final = 0.5
"""Seconds between two checks of positions, log ends, and whether the loop still runs."""

_ERRORS_KEPT: Final = 100
"""Maximum number of errors, from the first requests, in which the thread searches for a cause."""


@dataclass(eq=False, repr=False)
class ClientThread:
    """One client and its thread.

    Attributes:
        config: Configuration of the client.
        names: Names of the topics.
        make: Function that makes a client from its configuration.
        key: Function that returns the key of a message.
        bridge: Bridge to the event loop.
        deliver_on_loop: Function that receives, on the event loop, events in order, the number of their demand, and a
            flag. The flag is True if the thread continues to read at once and then calls again.
        failed: Function that the event loop calls when the thread cannot continue.
        ended: Function that the event loop calls when the thread ends.
        clock: Monotonic clock, in seconds.
        name: Name of the source, for errors and log lines.
        hands_over: Whether commits carry metadata for the next owner of a partition.
        rebuilds: Maximum number of rebuilds; see ``Rebuilds``.
        queues: Partitioned queues among the topics.
        on_growth: Reaction to an increase of a topic's partitions.
        transacts: Whether transactions commit the positions.
        polled: Time of the last poll of the client, in seconds of the clock.
        partitions: Number of partitions of all topics together, at the start.
        limit: Maximum number of UTF-16 units of commit metadata; 0 = commits carry no metadata.
        end_offsets: End offsets of the owned partitions.
        retention: Retention of the owned partitions.
        queue_watch: Object that checks ``queues``.
        growth: Object that checks the number of partitions of the topics.
        errors: Log of the client's errors.
        client_log: Log of the lines that the client writes.
    """

    config: ClientConfig
    names: Sequence[str]
    make: Callable[[dict[str, Any]], Consumer]
    key: KeyFunction
    bridge: Bridge
    deliver_on_loop: Callable[[Sequence[SourceEvent], int, bool], None]
    failed: Callable[[SourceError], None]
    ended: Callable[[], None]
    clock: Clock
    name: str
    hands_over: bool
    rebuilds: int
    queues: Sequence[PartitionedQueue] = ()
    on_growth: OnGrowth = "alarm"
    transacts: bool = False

    def __post_init__(self) -> None:
        clock, settings = self.clock, self.config.client
        self._rebuilds = Rebuilds(self.rebuilds, clock)
        self._rebuild_in: float | None = None
        self.polled = clock()
        self.limit = LIMIT
        self.end_offsets = EndOffsets(clock, self._admin, isolation_of(settings.get("isolation.level")))
        self.retention = LogRetention(self._admin, self.end_offsets, clock)
        self.growth = GrowthWatch(self.name, self.on_growth, self._fail)
        group, make = self.config.group, self._make_admin
        self.queue_watch = QueueWatch(
            self.queues, group, self._admin, make, lambda: self._client, self.send, clock, self.name
        )
        self._keys = KeyWatch(self.name)
        self._outage_log = OutageLog(log, self.name, "broker", "no commit is confirmed", clock)
        self.errors = ErrorLog(self.name, clock, settings.get("error_cb"), settings)
        self.client_log = ClientLog(self.name, clock, settings)
        self._demand = Demand(0, 0, Credit(0, 0), 0, frozenset(), {})
        self._applied = self._demand
        self._mailbox = Mailbox(self._perform)
        # Totals of the messages and events sent to the loop since the start.
        self._messages_sent = self._bytes_sent = self._assigned = 0
        self._filling = False
        self._failure: SourceError | None = None
        self._idle_since = self._quiet_since = clock()
        self._positions_at = 0.0
        self._rest = ReadRest()
        self._has_more = False
        self._patience = _READ_PAST_FOR
        self.thread = threading.Thread(target=self._run, name="lanes-kafka", daemon=True)

    # --- from the event loop

    def start(self, answer: Answer[None]) -> None:
        """Start the thread, which creates the client, joins the group, and then answers. The call does not block."""
        self._opened = answer
        self.thread.start()

    def demand(self, demand: Demand) -> None:
        """Replace the demand. The call does not block."""
        self._demand = demand
        self._mailbox.put(None)

    @property
    def session(self) -> Session:
        """The newest known session of the member in its group. After the start, any thread may read this property."""
        return self._session.session

    def last_error(self) -> tuple[str, float] | None:
        """The last error or warning of the client and its age in seconds; None before the first error or warning.

        Any thread may call this method.
        """
        # The client logs a request without an answer as a warning, and reports no error.
        said = [each for each in (self.errors.last(), self.client_log.last()) if each is not None]
        return min(said, key=lambda each: each[1], default=None)

    def outage(self) -> Outage | None:
        """The present outage; None = a broker answers. Any thread may call this method."""
        if not hasattr(self, "_topics"):
            return None
        return self._topics.contact.outage(*(self.last_error() or ("", None)))

    def rejoining(self) -> bool:
        """Whether the group has assigned no partition since the start or an outage. Any thread may call this method."""
        return hasattr(self, "_group") and (self._group.rejoining or self._group.join_watch.waits)

    def snapshot(self) -> GroupSnapshot:
        """The newest snapshot of the group, for transactions. Any thread may call this method."""
        return self._group.snapshots.latest if hasattr(self, "_group") else GroupSnapshot(None, frozenset())

    def send(self, command: Command) -> None:
        """Send a command to the thread. The call does not block."""
        self._mailbox.put(command)

    # --- the thread

    def _run(self) -> None:
        try:
            self._open()
            self._opened.give(None)
            while not self._group.closing:
                if self._rebuild_in is None:
                    self._turn()
                else:
                    self._rebuild(self._rebuild_in)
        except BaseException as error:
            # A function of the user may raise SystemExit. Uncaught, SystemExit would end the thread silently.
            failure = fatal_error(f"{self.name}: the client's thread failed", error, self.config.client)
            by_callback = isinstance(error, CallbackError)
            self._opened.fail(error if isinstance(error, Exception) and not by_callback else failure)
            if hasattr(self, "_group"):
                self._group.lose_all("the client's thread has failed")
            self._fail(failure)
        try:
            self._close()
        except BaseException as error:
            log.warning(
                "%s: cannot close the client (%s); the source ends anyway",
                self.name,
                exception_text(error, self.config.client),
            )
        if hasattr(self, "_topics"):
            self._topics.close()
        self.client_log.end()
        self.bridge.post(self.ended)

    def _open(self) -> None:
        config = self.config
        reported: deque[KafkaError] = deque(maxlen=_ERRORS_KEPT)
        self.client_log.reported = reported
        connecting = self.client_log.added_to(config.admin) | {"error_cb": reported.append}
        try:
            # ``Topics`` has the only reference to this client. The client's threads and sockets end with the last
            # reference.
            self._topics = Topics(self.names, AdminClient(connecting), self.clock, lambda: self.send(None))
            self._topics.check(OPEN_TIMEOUT, config.admin, self.name, reported)
            self.partitions = sum(topic.partitions for topic in self._topics.known.values())
            assert self._topics.admin is not None
            self.limit = metadata_room(self._topics.admin, self.name) if self.hands_over else 0
            self._session = SessionWatch(config, self._admin, self.clock, session_of(config, self._topics.admin))
            self._make_group()
            self._join()
        except KafkaException as failure:
            raise startup_error(self.name, failure, config.client) from None

    def _admin(self) -> AdminClient | None:
        return self._topics.admin

    def _make_admin(self) -> AdminClient:
        return AdminClient(self.client_log.added_to(self.config.admin))

    def _make_group(self) -> None:
        self._group = Group(
            self.config,
            self._topics,
            self._deliver,
            self._serve_callback,
            self._fail,
            self.clock,
            self.name,
            is_full=lambda: self._demand.messages <= 0,
            hands_over=self.hands_over,
            snapshots=Snapshots(wanted=self.transacts),
        )
        settings = self.config.client
        self._commits = Commits(self._group.owns, self._presume_lost, self.clock, self.name, settings, self.limit)
        self._topic_id_check = TopicIdCheck(
            self._topics, self._group, self._commits, self.errors, self.clock, self.name
        )
        self._membership = Membership(
            self.config,
            self._make_admin,
            self._group,
            lambda: self.session,
            self._presume_lost,
            self.clock,
            self.name,
        )

    def _join(self) -> None:
        # Copy the dictionary, because a client keeps it, and the same configuration may make another client.
        client = self.client_log.added_to(self.config.client) | {
            "on_commit": self._on_commit,
            "error_cb": self.errors.on_error,
        }
        try:
            self._client = self.make(client)
        except (TypeError, ValueError) as failure:
            if self.make is not Consumer:
                raise
            raise startup_error(self.name, failure, client) from None
        group = self._group
        self._intake = Intake(self._client, group, self.key, self._on_error_message)
        self._client.subscribe(
            list(self.names), on_assign=group.on_assign, on_revoke=group.on_revoke, on_lost=group.on_lost
        )
        self._rebuilds.built()

    # --- a turn

    def _turn(self) -> None:
        # Whether a command, or an answer about topics, may need the housekeeping at once.
        woken = bool(self._mailbox)
        if woken and self._mailbox.serve():
            self._quiet_since = self.clock()
        if self._group.closing:
            # Perhaps no further command arrives to end the wait below.
            return
        now = self.clock()
        demand = self._demand
        if not demand.number:
            # The caller of ``open`` may still refuse the source, so join and commit nothing before the first
            # ``receive``.
            self._mailbox.wait(POLL)
            return
        self._group.join_watch.joins()
        if demand is not self._applied:
            self._apply(demand)
            self._quiet_since = now
        waits = self._topic_id_check or self._membership or self.queue_watch
        patience = _ANSWER_POLL if waits else POLL
        if now - self._quiet_since >= IDLE_AFTER and not waits and not self._commits.unanswered:
            patience = IDLE_POLL
        count = self._to_read(demand)
        if count and (demand.messages > 0 or now - self._idle_since < PAUSE_AFTER):
            if demand.messages > 0:
                self._idle_since = now
                self._group.apply_pauses(self._client, demand.client_paused, demand.paused)
            if now < self._rest.until:
                if self._mailbox.wait(self._rest.until - now):
                    # The next turn computes the number of messages again, because the command may have used credit.
                    woken = True
                elif not self._mailbox and self.clock() >= self._rest.until:
                    self._read(count, 0.0)
            elif self._topic_id_check and not self._has_more and self._mailbox.wait(_ANSWER_POLL):
                # The answer about topic ids ends a wait of the mailbox, but not a poll.
                woken = True
            else:
                self._read(count, 0.0 if self._mailbox or self._filling else patience)
        elif all(each.paused for each in self._group.owned.values()):
            # A paused client returns no messages, but ``consume`` runs its callbacks.
            self._read(1, patience)
        elif now - self._idle_since >= PAUSE_AFTER:
            everything = frozenset(each.partition for each in self._group.owned.values())
            self._group.apply_pauses(self._client, everything, everything)
        elif self._commits.unanswered or waits:
            # The answers to commits do not wake the thread.
            woken = self._mailbox.wait(_ANSWER_POLL) or woken
            if not woken and self._commits.unanswered:
                self._read(1, 0.0)
        else:
            woken = self._mailbox.wait(self._idle_since + PAUSE_AFTER - now) or woken
        self._do_housekeeping(woken=woken)

    def _apply(self, demand: Demand) -> None:
        before, self._applied = self._applied.number, demand
        for partition, (number, position) in demand.rewind.items():
            assignment = self._group.assignment(partition) if number > before else None
            if assignment is not None and not assignment.released:
                assignment.position = position
                self._client.seek(assignment.at(position))
        # Resume no partition here, so that a partition paused for lack of room stays paused.
        self._group.apply_pauses(self._client, demand.client_paused, demand.paused, resume=False)

    def _to_read(self, demand: Demand) -> int:
        """Return the number of messages to read now."""
        if self._failure is not None or demand.assigned < self._assigned:
            return 0
        size = demand.credit.bytes - self._bytes_sent
        if size <= 0:
            return 0
        # Read a message that exceeds the credit alone.
        return max(
            0, min(demand.credit.messages - self._messages_sent, int(size / max(1.0, self._intake.average)) or 1)
        )

    def _read(self, count: int, timeout: float) -> None:
        self.polled = self.clock()
        events, more = self._intake.read(min(count, BATCH), timeout)
        self.polled = self.clock()
        if self._demand.messages > 0:
            # A callback of this call may have taken longer than ``PAUSE_AFTER``, even if the loop has room.
            self._idle_since = self.polled
        self._has_more = more
        if events:
            self._rest.read(sum(len(event.run) for event in events), self.polled, more=more)
            self._quiet_since = self.polled
            self.errors.answered()
            self._keys.observe(events, self._topics.known)
        if events or self._filling:
            self._deliver(events, filling=more and count > BATCH)

    # --- commands

    def _serve_callback(self, until: float) -> None:
        """Perform one command that arrives within half a second, inside a callback that must end at ``until``."""
        self._topic_id_check.resend(self._client, until)
        self._mailbox.wait(min(until - self.clock(), _HOUSEKEEPING_EVERY), until=until)
        self._check_loop()

    def _perform(self, command: Command, *, until: float | None) -> None:
        if isinstance(command, Commit):
            self._topic_id_check.commit(self._client, command, until=until)
        elif isinstance(command, Release):
            self._release(command, until=until)
        elif isinstance(command, Expire):
            self._presume_lost("the client was not polled for max.poll.interval.ms")
        elif isinstance(command, Confirm):
            self._membership.ask(command)
        elif isinstance(command, Close):
            self._group.closing = True

    def _release(self, command: Release, *, until: float | None) -> None:
        gap = None
        if command.committed is not None and self._failure is None and not self.errors.down:
            if until is None:
                before = self.clock()
                others = self._intake.read_past(command.partition, command.committed, self._patience)
                self._patience = max(0.0, self._patience + before - self.clock())
                self._deliver(others)
            # No event reports a gap after the last message of a released partition. The lag would remain, so commit the
            # gap here.
            gap = self._intake.gap_after(command.partition, command.committed)
        if gap is None:
            self._group.release(command.partition)
            command.answer.give(None)
        else:
            self._group.drained(command.partition)
            last = Commit([Settlement(command.partition, [], gap)], command.answer, command.partition)
            self._topic_id_check.commit(self._client, last, until=until)

    def _on_commit(self, error: KafkaError | None, offsets: list[TopicPartition]) -> None:
        self.errors.answered()
        self._commits.on_commit(error, offsets)
        if self.config.on_commit is not None:
            self.config.on_commit(error, offsets)

    # --- failures

    def _presume_lost(self, reason: str) -> None:
        self._group.lose_all(reason, presumed=True)

    def _fail(self, failure: SourceError) -> None:
        """Report a failure to the loop.

        Until the loop closes the client, the thread polls the client and reads no messages.
        """
        if self._failure is None:
            self._failure = failure
            self.bridge.post(lambda: self.failed(failure))

    def _on_error_message(self, error: KafkaError, raw: Raw) -> None:
        code = error.code()
        if error.fatal() or code == KafkaError._FATAL:
            self._fatal(error)
        elif code == KafkaError._AUTO_OFFSET_RESET:
            # Check the ids first, because every offset may be out of range in a recreated topic.
            self._topics.wait(_TOPIC_ID_TIMEOUT)
            self._group.check_topics()
            self._group.out_of_range(self._client, partition_id_of(raw), offset_of(raw))
        elif code == KafkaError._MAX_POLL_EXCEEDED:
            log.error(
                "%s: the client was not polled for max.poll.interval.ms, so the group removed this member; make the "
                "callbacks of the configuration and the key function return sooner",
                self.name,
            )
        elif code == KafkaError.UNKNOWN_TOPIC_OR_PART:
            # The ids show whether the topic is deleted, or only unknown to one broker for a moment.
            self._topics.ask()
        elif is_permanent(error):
            self._fail(SourceError(f"{self.name}: {client_message(error, self.config.client)}"))
        elif code != KafkaError._PARTITION_EOF:
            self.errors.on_message(error)

    def _fatal(self, error: KafkaError) -> None:
        """Handle a permanent failure of the client. The client calls no rebalance callback for such a failure."""
        why = what = "the client has failed permanently"
        if self.config.instance is not None:
            why = f"only one member may have group.instance.id={self.config.instance!r}; give each member its own"
            what = f"{why}; the client has failed permanently"
        what += f": {client_message(error, self.config.client)}"
        # The error of the run follows, and contains the text of the client too.
        self._group.lose_all(why)
        if self._rebuild_in is not None:
            # The client reports the same error repeatedly.
            return
        self._rebuild_in = self._rebuilds.next_pause()
        if self._rebuild_in is None:
            self._fail(SourceError(f"{self.name}: {what}"))
        else:
            log.error("%s: %s; the client is rebuilt in %g s", self.name, what, self._rebuild_in)

    def _rebuild(self, pause: float) -> None:
        """Rebuild the client after ``pause`` seconds. Commands run during the pause, and a stop ends the pause."""
        self._rebuild_in = None
        self._close()
        self.limit = self._commits.limit
        # The new group owns nothing, so commits of the former assignments fail.
        self._make_group()
        due = self.clock() + pause
        while not self._group.closing and (left := due - self.clock()) > 0:
            # No client exists during the pause, so count the poll as done.
            self.polled = self.clock()
            self._mailbox.wait(min(left, _HOUSEKEEPING_EVERY))
        if not self._group.closing:
            self._join()

    # --- housekeeping

    def _do_housekeeping(self, *, woken: bool) -> None:
        now = self.clock()
        due = now >= self._positions_at
        waits = self._topic_id_check or self._commits.unanswered or self._membership or self.queue_watch
        if not (woken or due or waits):
            return
        self._topic_id_check.advance(self._client)
        self._membership.advance(self._client, lambda: self._read(1, 0.0))
        ask = not self.errors.down and self._failure is None
        self.queue_watch.advance(ask=ask)
        if due:
            self._positions_at = now + _HOUSEKEEPING_EVERY
            self.client_log.due()
            self._check_loop()
            progress = self._intake.progress()
            if progress:
                self._deliver(progress)
            owned = [each for each in self._group.owned.values() if not each.released]
            self.end_offsets.refresh(self._client, owned, ask=ask)
            self.retention.refresh(owned, ask=ask)
            self._session.refresh()
            outage = self.outage()
            self._outage_log.look(outage)
            self._group.report_return()
            partitions = sum(topic.partitions for topic in self._topics.known.values())
            self._group.join_watch.look(self.session.timeout, partitions, outage=outage is not None)
            self._keys.report(self._topics.known)
            self.growth.look(self._topics.known)
            try:
                self._group.reclaim(self._client)
            except KafkaException as failure:
                self._fail(fatal_error(f"{self.name}: cannot assign partitions again", failure, self.config.client))
            except SourceError as failure:
                self._fail(failure)

    def _deliver(self, events: Sequence[SourceEvent], *, filling: bool = False) -> None:
        """Send events to the loop.

        ``filling``: whether the thread continues to read at once, and then calls this method again.
        """
        if not events and not self._filling:
            return
        self._filling = filling
        for event in events:
            if isinstance(event, Delivered):
                self._messages_sent += len(event.run)
                self._bytes_sent += event.size
            elif isinstance(event, Assigned):
                self._assigned += 1
        number = self._applied.number
        self.bridge.post(lambda: self.deliver_on_loop(events, number, filling))

    def _check_loop(self) -> None:
        if not self.bridge.is_alive():
            # Without the loop, no partition can drain.
            self._group.closing = True

    def _close(self) -> None:
        if hasattr(self, "_client"):
            # Closing ends the heartbeats. A stop therefore drains all partitions before it closes the client.
            self._group.closing = True
            try:
                serve_last_callbacks(self._client, self._group, self.clock, static=self.config.instance is not None)
            finally:
                self._client.close()
            self._topic_id_check.abandon("the client was closed")
            self._membership.end()
            self.queue_watch.end()
