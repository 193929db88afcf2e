"""The thread that owns a client: every call on it is made here, for one from another thread starves for seconds.

The event loop asks (``want``, ``send``) and is told (``told``); neither side ever waits for the other inside a call of
the client but in a revoke, which is there for that. What is asked for is looked at between two calls of ``consume``,
each of which waits ``POLL`` seconds at most.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka import Message as Raw
from confluent_kafka.admin import AdminClient

from lanes.clock import Clock
from lanes.core.offset_map import LIMIT
from lanes.core.types import Settlement
from lanes.errors import SourceError
from lanes.source import SourceEvent
from lanes_kafka.bridge import Answer, Bridge
from lanes_kafka.client.commits import Commit, Commits, Vetting, metadata_room
from lanes_kafka.client.group import Group
from lanes_kafka.client.intake import Intake, partition_id_of
from lanes_kafka.client.key_watch import KeyWatch
from lanes_kafka.client.lag import Ends
from lanes_kafka.client.mailbox import Close, Command, Expire, Mailbox, Release, Want
from lanes_kafka.client.prefetch import Ahead
from lanes_kafka.client.records import KeyFunction, offset_of
from lanes_kafka.client.topics import Topics
from lanes_kafka.config import ClientConfig
from lanes_kafka.errors import ErrorLog, ended_by, is_permanent, refusal, said, words

log = logging.getLogger("lanes.kafka")

POLL: Final = 0.02
"""Seconds that one call of the client waits for messages at most: so long a command may wait."""

BATCH: Final = 1_000
"""Messages that are handed to the event loop at once, at most."""

PAUSE_AFTER: Final = 1.0
"""Seconds without room after which the client is paused: a pause costs a third of a second and what was fetched, and
the client has to be polled."""

OPEN_TIMEOUT: Final = 10.0
"""Seconds that a broker may take to describe the topics at the start."""

_LOOK_TIMEOUT: Final = 1.0
"""Seconds that a position out of range waits for the ids of the topics."""

_PEEK: Final = 0.005
"""Seconds between two looks for the answers of commits, and for what they wait for: each may bring a message."""

_BEHIND_FOR: Final = 0.5
"""Seconds that all partitions given back in no callback may take to find a marker behind their last messages."""

_POSITIONS_EVERY: Final = 0.5
"""Seconds between two looks at how far the client has read."""

FIRST_PAUSE: Final = 1.0
"""Seconds before the first attempt; before each further one twice as long."""

LONGEST_PAUSE: Final = 30.0
"""Seconds before an attempt at most."""

HEALTHY_AFTER: Final = 300.0
"""Seconds without a failure after which all begins anew. Much more than the longest pause: of two clients that fence
each other in turn each is well for as long as the other one pauses."""


_WITHIN: Final = 2.0
"""Seconds that the callbacks may take; what comes after is for ``close`` to serve."""

_QUIET_FOR: Final = 0.01
"""Seconds without a callback after which none is to come."""

Told = Callable[[Sequence[SourceEvent], int], None]


class Owner:
    """One client and its thread. ``told`` is called on the event loop with events in order and the number of the last
    ``Want`` they were read for, ``failed`` when it cannot go on, and ``ended`` when the thread ends.

    ``polled``: when the client was polled last, in seconds of the clock. ``partitions``: of all topics together, at the
    start. ``limit``: UTF-16 units of commit metadata that the broker takes, as far as is known.
    """

    def __init__(
        self,
        config: ClientConfig,
        topics: Sequence[str],
        make: Callable[[dict[str, Any]], Consumer],
        key: KeyFunction,
        bridge: Bridge,
        told: Told,
        failed: Callable[[SourceError], None],
        ended: Callable[[], None],
        clock: Clock,
        name: str,
        *,
        hands_over: bool,
        rebuilds: int,
    ) -> None:
        self._config = config
        self._names = tuple(topics)
        self._make = make
        self._key = key
        self._bridge = bridge
        self._told = told
        self._failed = failed
        self._ended = ended
        self._clock = clock
        self._name = name
        self._hands_over = hands_over
        self._restarts = Restarts(rebuilds, clock)
        self._restart_in: float | None = None
        self.polled = clock()
        self.limit = LIMIT
        self.ends = Ends(clock)
        self._keys = KeyWatch(name)
        self.errors = ErrorLog(name, clock, config.client.get("error_cb"), config.client)
        self._want = Want(0, 0, 0, frozenset(), {})
        self._applied = self._want
        self._answered = self._want
        self._mailbox = Mailbox(self._perform)
        self._ahead = Ahead()
        self._failure: SourceError | None = None
        self._idle_since = clock()
        self._positions_at = 0.0
        self._patience = _BEHIND_FOR
        self._client: Consumer
        self._intake: Intake
        self._group: Group
        self._commits: Commits
        self._vetting: Vetting
        self._topics: Topics
        self.thread = threading.Thread(target=self._run, name="lanes-kafka", daemon=True)

    # --- from the event loop

    def start(self, answer: Answer) -> None:
        """Make the client and join the group; ``answer`` says whether that could be done. Does not block."""
        self._opened = answer
        self.thread.start()

    def want(self, want: Want) -> None:
        """Replace what is wanted. Does not block."""
        self._want = want
        self._mailbox.put(None)

    def send(self, command: Command) -> None:
        """Have a command performed. Does not block."""
        self._mailbox.put(command)

    # --- the thread

    def _run(self) -> None:
        try:
            self._open()
            self._opened.give()
            while not self._group.closing:
                if self._restart_in is None:
                    self._turn()
                else:
                    self._restart(self._restart_in)
        except BaseException as error:
            # Of a callback of the user's that calls sys.exit() too: it would end the thread without a word.
            failure = ended_by(f"{self._name}: the client's thread failed", error, self._config.client)
            self._opened.give(error if isinstance(error, Exception) else failure)
            if hasattr(self, "_group"):
                self._group.lose_all("the client's thread has failed")
            self._fail(failure)
        try:
            self._close()
        except BaseException as error:
            log.warning("%s: the client was not closed in order: %s", self._name, words(error, self._config.client))
        if hasattr(self, "_topics"):
            self._topics.close()
        self._bridge.post(self._ended)

    def _open(self) -> None:
        config = self._config
        try:
            # Known there alone: its threads and sockets end when nobody knows it any more, no traceback either.
            self._topics = Topics(self._names, AdminClient(dict(config.admin)), self._clock, lambda: self.send(None))
            self._topics.check(OPEN_TIMEOUT, config.admin, self._name)
            self.partitions = sum(topic.partitions for topic in self._topics.known.values())
            if self._hands_over:
                assert self._topics.admin is not None
                self.limit = metadata_room(self._topics.admin, self._name)
            self._form()
            self._join()
        except KafkaException as failure:
            raise refusal(self._name, failure, config.client) from None

    def _form(self) -> None:
        self._group = Group(
            self._config,
            self._topics,
            self._tell,
            self._serve_callback,
            self._fail,
            self._clock,
            self._name,
            starved=lambda: self._want.messages <= 0,
            hands_over=self._hands_over,
        )
        settings = self._config.client
        self._commits = Commits(self._group.owns, self._presume_lost, self._clock, self._name, settings, self.limit)
        self._vetting = Vetting(self._topics, self._group, self._commits, self.errors, self._clock, self._name)

    def _join(self) -> None:
        # The configuration may be used again, and a client keeps what it is given.
        client = dict(self._config.client) | {"on_commit": self._on_commit, "error_cb": self.errors.on_error}
        try:
            self._client = self._make(client)
        except (TypeError, ValueError) as failure:
            if self._make is not Consumer:
                raise
            raise refusal(self._name, failure, client) from None
        group = self._group
        self._intake = Intake(self._client, group, self._key, self._on_error_message)
        self._client.subscribe(
            list(self._names), on_assign=group.on_assign, on_revoke=group.on_revoke, on_lost=group.on_lost
        )
        self._restarts.made()

    # --- a turn

    def _turn(self) -> None:
        self._mailbox.serve()
        if self._group.closing:
            # Nothing else may come that would end the wait below.
            return
        now = self._clock()
        want = self._want
        if not want.number:
            # Who opens it may refuse what it is: nothing is joined, and no beginning committed, before it is read.
            self._mailbox.wait(POLL)
            return
        if want is not self._applied:
            # Told as read before it: of what it rewinds nothing is delivered twice.
            self._tell([])
            self._apply(want)
        count, patience = 0, _PEEK if self._vetting else POLL
        if want is not self._answered and self._failure is None:
            count = self._ahead.wanted(want, self._group, self._intake.average)
        if count and (want.messages > 0 or now - self._idle_since < PAUSE_AFTER):
            if want.messages > 0:
                self._idle_since = now
                self._group.rest(self._client, want.resting, want.paused)
            self._read(count, 0.0 if self._mailbox or self._ahead else patience, want)
        elif all(each.paused for each in self._group.owned.values()):
            # Of a client that is paused nothing comes but what is to be called back.
            self._read(1, patience, want)
        elif now - self._idle_since >= PAUSE_AFTER:
            everything = frozenset(each.partition for each in self._group.owned.values())
            self._group.rest(self._client, everything, everything)
        elif self._commits.under_way or self._vetting:  # whose answer may have come, and wakes nobody any more
            if not self._mailbox.wait(_PEEK) and self._commits.under_way:
                self._read(1, 0.0, want)
        else:
            self._mailbox.wait(self._idle_since + PAUSE_AFTER - now)
        self._keep_house()

    def _apply(self, want: Want) -> None:
        before, self._applied = self._applied.number, want
        for partition, (number, position) in want.rewind.items():
            assignment = self._group.owned.get(partition.id) if number > before else None
            if assignment is not None and assignment.partition is partition and not assignment.released:
                assignment.position = position
                self._client.seek(assignment.at(position))
        # Without room nothing is resumed: what was paused for that may stay so.
        self._group.rest(self._client, want.resting, want.paused, resume=False)

    def _read(self, count: int, timeout: float, want: Want) -> None:
        self.polled = self._clock()
        events, more = self._intake.read(min(count, BATCH), timeout)
        self.polled = self._clock()
        if events:
            self.errors.answered()
            self._keys.look(events, self._topics.known)
            self._ahead.gather(events)
        if self._ahead and not (more and count > BATCH):
            self._answered = want
            self._tell([])

    # --- commands

    def _serve_callback(self, until: float) -> None:
        """Perform for a moment what the loop asks for while a callback of the client waits, which has to end then."""
        self._vetting.repeat(self._client, until)
        self._mailbox.wait(min(until - self._clock(), _POSITIONS_EVERY), until=until)
        self._look_at_loop()

    def _perform(self, command: Command, *, until: float | None) -> None:
        if isinstance(command, Commit):
            self._vetting.commit(self._client, command, until=until)
        elif isinstance(command, Release):
            self._release(command, until=until)
        elif isinstance(command, Expire):
            self._presume_lost("the client was not polled for max.poll.interval.ms")
        elif isinstance(command, Close):
            self._group.closing = True

    def _release(self, command: Release, *, until: float | None) -> None:
        gap = None
        if command.committed is not None and self._failure is None and not self.errors.down:
            if until is None:
                before = self._clock()
                self._ahead.gather(self._intake.read_behind(command.partition, command.committed, self._patience))
                self._patience = max(0.0, self._patience + before - self._clock())
                self._tell([])
            # Who drains is told of no gap that is found behind its last message, and the lag would stay.
            gap = self._intake.gap_behind(command.partition, command.committed)
        if gap is None:
            self._group.release(command.partition)
            command.answer.give()
        else:
            self._group.drained(command.partition)
            last = Commit([Settlement(command.partition, [], gap)], command.answer, command.partition)
            self._vetting.commit(self._client, last, until=until)

    def _on_commit(self, error: KafkaError | None, offsets: list[TopicPartition]) -> None:
        self.errors.answered()
        self._commits.on_commit(error, offsets)
        if self._config.on_commit is not None:
            self._config.on_commit(error, offsets)

    # --- what goes wrong

    def _presume_lost(self, reason: str) -> None:
        self._group.lose_all(reason, presumed=True)

    def _fail(self, failure: SourceError) -> None:
        """Have the loop stop in order; until it closes the client nothing is read, and it is polled on."""
        if self._failure is None:
            self._failure = failure
            self._bridge.post(lambda: self._failed(failure))

    def _on_error_message(self, error: KafkaError, raw: Raw) -> None:
        code = error.code()
        if error.fatal() or code == KafkaError._FATAL:
            self._fatal(error)
        elif code == KafkaError._AUTO_OFFSET_RESET:
            # Of a topic that was made anew every offset is out of range.
            self._topics.wait(_LOOK_TIMEOUT)
            self._group.check_topics()
            self._group.out_of_range(self._client, partition_id_of(raw), offset_of(raw))
        elif code == KafkaError._MAX_POLL_EXCEEDED:
            log.error("%s: not polled for max.poll.interval.ms: out of the group, partitions are lost", self._name)
        elif code == KafkaError.UNKNOWN_TOPIC_OR_PART:
            # Whether it is gone, or only unknown to one broker for a moment, the ids tell.
            self._topics.question()
        elif is_permanent(error):
            self._fail(SourceError(f"{self._name}: {said(error, self._config.client)}"))
        elif code != KafkaError._PARTITION_EOF:
            self.errors.on_message(error)

    def _fatal(self, error: KafkaError) -> None:
        """The client can never go on, and no callback says so."""
        what = f"the client has failed for good: {said(error, self._config.client)}"
        if self._config.instance is not None:
            what += f": only one member may have group.instance.id={self._config.instance!r}; give each its own"
        self._group.lose_all(what)
        if self._restart_in is not None:
            # It says so again.
            return
        self._restart_in = self._restarts.next()
        if self._restart_in is None:
            self._fail(SourceError(f"{self._name}: {what}"))
        else:
            log.error("%s: it is made anew in %g s: %s", self._name, self._restart_in, what)

    def _restart(self, pause: float) -> None:
        """Make the client anew after a pause in which commands are served, so that a stop ends it."""
        self._restart_in = None
        self._close()
        self.limit = self._commits.limit
        # Of this one nothing is owned: that answers what is asked of the former.
        self._form()
        due = self._clock() + pause
        while not self._group.closing and (left := due - self._clock()) > 0:
            # There is none to poll.
            self.polled = self._clock()
            self._mailbox.wait(min(left, _POSITIONS_EVERY))
        if not self._group.closing:
            self._join()

    # --- housekeeping

    def _keep_house(self) -> None:
        now = self._clock()
        self._vetting.look(self._client)
        if now >= self._positions_at:
            self._positions_at = now + _POSITIONS_EVERY
            self._look_at_loop()
            progress = self._intake.progress()
            if progress:
                self._tell(progress)
            owned = [each for each in self._group.owned.values() if not each.released]
            self.ends.look(self._client, owned, ask=not self.errors.down and self._failure is None)
            self._keys.tell(self._topics.known)
            try:
                self._group.readopt(self._client)
            except KafkaException as failure:
                self._fail(ended_by(f"{self._name}: partitions not assigned again", failure, self._config.client))

    def _tell(self, events: Sequence[SourceEvent]) -> None:
        """What was read, and then these."""
        number, events = self._applied.number, [*self._ahead.taken(), *events]
        if events:
            self._bridge.post(lambda: self._told(events, number))

    def _look_at_loop(self) -> None:
        if not self._bridge.alive():
            # Nobody is there any more to drain anything.
            self._group.closing = True

    def _close(self) -> None:
        if hasattr(self, "_client"):
            # Heartbeats stop in here: whatever had to be drained has been.
            self._group.closing = True
            try:
                be_called_back(self._client, self._group, self._clock, static=self._config.instance is not None)
            finally:
                self._client.close()
            self._vetting.abandon("the client was closed")


def be_called_back(client: Consumer, group: Group, clock: Clock, *, static: bool) -> None:
    """Have a client call back whatever it has to, so that ``close`` finds nothing to call; ``group`` is closing.

    While it closes, librdkafka may end the group before it has served a rebalance that it has queued. What the callback
    then asks of the group, an assignment by default, is answered by nobody: the call waits for ever, and the binding
    holds the interpreter's lock meanwhile (librdkafka's issue 4884). A ``static`` member keeps what it has: to give it
    back would be to leave the group, which ``close`` does not do for it. Blocks for 2 s at most; whatever goes wrong
    here ``close`` meets again.
    """
    until = clock() + _WITHIN
    try:
        if not static:
            client.unsubscribe()
        quiet = False
        while clock() < until and not quiet:
            if static:
                # A callback lies behind the messages that are there, and there would be more of them for ever.
                client.pause(client.assignment())
            rounds = group.rounds
            # What comes is nobody's any more.
            raws = client.consume(1, _QUIET_FOR)
            quiet = not raws and group.rounds == rounds and (static or not client.assignment())
    except KafkaException:
        # Of a client that has failed for good: nothing is asked of it in a callback any more.
        return


class Restarts:
    """``attempts``: how many there are without a period of health between them; 0 or more."""

    def __init__(self, attempts: int, clock: Clock) -> None:
        self._attempts = self._left = attempts
        self._clock = clock
        self._pause = FIRST_PAUSE
        self._well_since = clock()

    def made(self) -> None:
        """A client was made."""
        self._well_since = self._clock()

    def next(self) -> float | None:
        """It has failed: take an attempt; returns the seconds to pause before it, None when none is left."""
        now = self._clock()
        if now - self._well_since >= HEALTHY_AFTER:
            self._left, self._pause = self._attempts, FIRST_PAUSE
        self._well_since = now
        if not self._left:
            return None
        self._left -= 1
        pause, self._pause = self._pause, min(LONGEST_PAUSE, self._pause * 2)
        return pause
