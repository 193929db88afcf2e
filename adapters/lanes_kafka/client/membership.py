"""Asks the broker after a freeze of the process whether this client is still a member of its group.

A group assigns the partitions of a member to other members when it has received no heartbeat for a session. After a
freeze, a client learns of this loss from its next heartbeat or later. The broker's list of members shows the removal at
once. A request for this list commits nothing. The group has not removed a listed member, so no other member owns the
partitions of a listed member. During a rebalance, the group waits for a member or removes the member.

A member outside the list has lost its partitions, even if the client still counts these partitions as owned. The broker
may leave the heartbeats of such a client unanswered for a whole session, for example after a router has dropped the
connection. The client therefore restarts a lost partition only after a new assignment, or after a newer list with this
member.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from confluent_kafka import Consumer, KafkaError, KafkaException
from confluent_kafka.admin import AdminClient, ConfigResource, ResourceType

from lanes.clock import Clock
from lanes.errors import SourceError
from lanes_kafka.broker import COORDINATOR_TIMEOUT, QUESTION_TIMEOUT, broker_settings, settings_of
from lanes_kafka.client.group import Group
from lanes_kafka.client.mailbox import Confirm
from lanes_kafka.config import ClientConfig
from lanes_kafka.errors import NO_ANSWER, NOT_ALLOWED, client_message

log = logging.getLogger("lanes.kafka")

_MARGIN: Final = 1.0
"""Seconds that a heartbeat may need to reach the broker."""

_DEFAULT_SESSION: Final = 45.0
"""Default session timeout in seconds of a broker for a group under KIP-848."""

_DEFAULT_HEARTBEAT: Final = 5.0
"""Default heartbeat interval in seconds of a broker for a group under KIP-848."""

_AGAIN: Final = 1.0
"""Seconds between two requests while no broker answers."""

_LOG_EVERY: Final = 30.0
"""Seconds between two log lines while no broker answers."""

_LOOK_EVERY: Final = 5.0
"""Seconds between two requests while the client counts partitions as owned that the thread presumes lost."""

_GIVEN_UP_AFTER: Final = 2 * QUESTION_TIMEOUT
"""Seconds without an answer or an error after which the client repeats a request."""

SESSION_EVERY: Final = 60.0
"""Seconds between two requests for the session under KIP-848."""


class Session(NamedTuple):
    """The session of a member, in seconds.

    Attributes:
        timeout: Time without a heartbeat after which the group removes the member.
        heartbeat: Time between two heartbeats.
        known: Whether a broker has answered. Without an answer of the broker, the times are the defaults of a broker.
    """

    timeout: float
    heartbeat: float
    known: bool = True

    @property
    def freeze_limit(self) -> float:
        """Length of a freeze after which the group may have removed the member; 0 = any freeze."""
        return self.timeout - self.heartbeat - _MARGIN if self.known else 0.0


def session_of(config: ClientConfig, admin: AdminClient) -> Session:
    """Return the session of a client.

    Under KIP-848 the settings of the group apply, or else the settings of the broker. If this user may read neither,
    the defaults of a broker apply. Without an answer the session is unknown. The call blocks for up to 20 seconds under
    KIP-848.
    """
    if config.session_timeout is not None and config.heartbeat_interval is not None:
        return Session(config.session_timeout, config.heartbeat_interval)
    default = Session(_DEFAULT_SESSION, _DEFAULT_HEARTBEAT, known=False)
    settings = _group_settings(config.group, admin)
    return default if settings is None else _session(settings, default)


class SessionWatch:
    """Knows the newest session of a member.

    Under KIP-848 an operator may change the session while the member runs. ``refresh`` therefore asks for the settings
    of the group every minute, and every 5 seconds while the session is unknown. The former session applies while the
    request fails.

    Args:
        config: Configuration of the client.
        admin: Function that returns the client to ask; None = do not ask.
        clock: Monotonic clock, in seconds.
        session: The session at the start.

    Attributes:
        session: The newest known session; any thread may read this attribute.
    """

    def __init__(
        self, config: ClientConfig, admin: Callable[[], AdminClient | None], clock: Clock, session: Session
    ) -> None:
        self.session = session
        self._config = config
        self._admin = admin
        self._clock = clock
        self._asked: Future[Any] | None = None
        self._next = clock() + self._pause

    @property
    def _pause(self) -> float:
        return SESSION_EVERY if self.session.known else _LOOK_EVERY

    def refresh(self) -> None:
        """Process an answer, and send a due request. The call does not block."""
        if self._asked is not None and self._asked.done():
            asked, self._asked = self._asked, None
            try:
                found = {entry.name: entry.value for entry in asked.result(0).values() if entry.value is not None}
            except KafkaException as failure:
                log.debug("the session of group %r is unknown: %s", self._config.group, failure)
            else:
                self.session = _session(found, self.session)
                self._next = self._clock() + SESSION_EVERY
        if self._config.session_timeout is None and self._asked is None and self._clock() >= self._next:
            self._next = self._clock() + self._pause
            admin = self._admin()
            if admin is not None:
                group = ConfigResource(ResourceType.GROUP, self._config.group)
                self._asked = admin.describe_configs([group], request_timeout=QUESTION_TIMEOUT)[group]


def _session(settings: Mapping[str, str], otherwise: Session) -> Session:
    return Session(
        _seconds(settings, "consumer.session.timeout.ms", otherwise.timeout),
        _seconds(settings, "consumer.heartbeat.interval.ms", otherwise.heartbeat),
    )


def _group_settings(group: str, admin: AdminClient) -> Mapping[str, str] | None:
    """Return the settings of a group, or else of the broker; None = no answer."""
    try:
        return settings_of(admin, ResourceType.GROUP, group, time.monotonic() + QUESTION_TIMEOUT)
    except KafkaException as failure:
        if failure.args[0].retriable() or failure.args[0].code() in NO_ANSWER:
            return None
        # The user may not read the settings of a group, or the broker has none.
        try:
            found = broker_settings(admin)
        except SourceError:
            return None
        return {name.removeprefix("group."): value for name, value in found.items() if name.startswith("group.")}


def _seconds(settings: Mapping[str, str], name: str, default: float) -> float:
    value = settings.get(name, "")
    return int(value) / 1000 if value.isdecimal() else default


@dataclass(eq=False, repr=False)
class Membership:
    """Answers ``Confirm`` commands. Only the thread that owns the client uses the object. True = a command waits.

    Attributes:
        config: Configuration of the client.
        make: Function that makes the client for one request.
        group: Assignments of the client.
        session: Function that returns the session of the member.
        lost: Function that receives the reason when the broker no longer lists this member.
        clock: Monotonic clock, in seconds.
        name: Name of the source, for errors.
    """

    config: ClientConfig
    make: Callable[[], AdminClient]
    group: Group
    session: Callable[[], Session]
    lost: Callable[[str], None]
    clock: Clock
    name: str
    _waiting: list[Confirm] = field(default_factory=list, init=False)
    _asked: list[Confirm] = field(default_factory=list, init=False)
    _admin: AdminClient | None = field(default=None, init=False)
    _future: Future[Any] | None = field(default=None, init=False)
    _member: str = field(default="", init=False)
    _next: float = field(default=0.0, init=False)
    _look_at: float = field(default=0.0, init=False)
    _given_up_at: float = field(default=0.0, init=False)
    _heard_at: float | None = field(default=None, init=False)
    _warned: bool = field(default=False, init=False)
    _unanswered_since: float | None = field(default=None, init=False)
    _log_at: float = field(default=0.0, init=False)

    def __bool__(self) -> bool:
        return bool(self._waiting or self._asked)

    def ask(self, command: Confirm) -> None:
        """Queue a command.

        The answer to an open request does not answer the command, because the request may be older than the command.

        The command follows a freeze. The call therefore also marks the partitions as doubted that the thread presumed
        lost earlier.
        """
        self._waiting.append(command)
        self.group.doubt()

    def advance(self, client: Consumer, poll: Callable[[], None]) -> None:
        """Ask the broker, or answer the commands after the broker's answer. A callback must not call this method.

        The call also asks the broker while ``group`` doubts a partition. The call does not block.

        Args:
            client: The client.
            poll: Function that serves the client's callbacks.
        """
        if self._heard_at is not None:
            if self.clock() >= self._heard_at:
                self._heard_at = None
                poll()
                confirmed = self._member == client.memberid()
                if confirmed and not self._waiting:
                    self.group.trust()
                self._answer(confirmed=confirmed)
        elif self._future is not None:
            assert self._admin is not None
            # A poll serves the callbacks and the log of this client.
            self._admin.poll(0)
            if self._future.done():
                future = self._future
                self._admin = self._future = None
                self._take(client, poll, future)
            elif self.clock() >= self._given_up_at:
                self._admin = self._future = None
                self._log_unanswered("no answer")
        elif (self or self.group.doubted) and self.clock() >= self._next:
            self._asked += self._waiting
            self._waiting = []
            self._asked = [each for each in self._asked if not each.answer.given_up]
            if self._asked or (self.group.doubted and self.clock() >= self._look_at):
                self._begin(client)

    def end(self) -> None:
        """End all commands without a confirmation, because the client is closed."""
        for command in [*self._asked, *self._waiting]:
            command.answer.give(())
        self._asked, self._waiting, self._heard_at = [], [], None
        self._admin = self._future = None

    def _begin(self, client: Consumer) -> None:
        now = self.clock()
        self._look_at, self._given_up_at = now + _LOOK_EVERY, now + _GIVEN_UP_AFTER
        self._member = client.memberid() or ""
        if not self._member or not self.group.owned:
            # The client has left the group, or knows that the group has removed it.
            self._answer(confirmed=False)
        if self._member and (self.group.owned or self.group.doubted):
            group = self.config.group
            try:
                self._admin = self.make()
            except KafkaException as failure:
                self._log_unanswered(client_message(failure.args[0], self.config.client))
                self._next = now + _AGAIN
                return
            self._future = self._admin.describe_consumer_groups([group], request_timeout=COORDINATOR_TIMEOUT)[group]

    def _take(self, client: Consumer, poll: Callable[[], None], future: Future[Any]) -> None:
        try:
            members = {each.member_id for each in future.result(0).members}
        except KafkaException as failure:
            if failure.args[0].code() in (*NOT_ALLOWED, KafkaError._UNSUPPORTED_FEATURE):
                self._wait_for_heartbeat(client_message(failure.args[0], self.config.client))
            else:
                self._log_unanswered(client_message(failure.args[0], self.config.client))
                self._next = self.clock() + _AGAIN
            return
        if self._member == (client.memberid() or ""):
            if self._member not in members:
                self.lost("the group removed this member while no thread of the process ran")
                self.group.doubt()
            elif not self._waiting:
                # A waiting command is newer than this list. A freeze may lie between the list and the command.
                self.group.trust()
        # A queued callback of the client may revoke partitions.
        poll()
        self._answer(confirmed=self._member in members and self._member == client.memberid())

    def _log_unanswered(self, why: str) -> None:
        """Log the first error of a confirmation, and then one error every 30 seconds."""
        now = self.clock()
        if self._unanswered_since is None:
            self._unanswered_since, self._log_at = now, now + _LOG_EVERY
            log.info("%s: the broker does not list the members of the group, retrying (%s)", self.name, why)
        elif now >= self._log_at:
            self._log_at = now + _LOG_EVERY
            log.warning(
                "%s: handlers wait for %.1f s after a freeze, because the broker does not list the members of the "
                "group (%s); check the coordinator of the group",
                self.name,
                now - self._unanswered_since,
                why,
            )

    def _wait_for_heartbeat(self, why: str) -> None:
        """Wait until the client has learned from a heartbeat whether it is a member."""
        pause = self.session().heartbeat + _MARGIN
        self._heard_at = self.clock() + pause
        if not self._warned:
            self._warned = True
            log.warning(
                "%s: the broker does not list the members of the group, so handlers wait %.1f s for a heartbeat after "
                "a freeze (%s); allow DESCRIBE on the group",
                self.name,
                pause,
                why,
            )

    def _answer(self, *, confirmed: bool) -> None:
        asked, self._asked = self._asked, []
        self._unanswered_since = None
        for command in asked:
            owned = [each for each in command.partitions if confirmed and self.group.assignment(each) is not None]
            command.answer.give(owned)
