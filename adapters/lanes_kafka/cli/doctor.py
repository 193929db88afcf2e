"""Checks of a configuration against its broker, before a consumer uses the configuration.

Each call blocks until its deadline at the latest. The checks do not join the group, and write nothing.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final

from confluent_kafka import Consumer, IsolationLevel, KafkaError, KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import AclOperation, AdminClient, OffsetSpec, ResourceType

from lanes.cli.doctor import Check
from lanes.errors import SourceError
from lanes_kafka.broker import (
    COORDINATOR_TIMEOUT,
    LEADER_MOVES,
    METADATA_LIMIT,
    QUESTION_TIMEOUT,
    answer,
    broker_settings,
    likely_cause,
    settings_of,
    similar_topic,
)
from lanes_kafka.client.commits import can_carry, room_within
from lanes_kafka.config import ClientConfig, address_name, addresses, redacted
from lanes_kafka.errors import NOT_ALLOWED, client_text, closed_at_first_request, is_login_refused, setting_meant

_PROTOCOLS: Final = "group.coordinator.rebalance.protocols"
_RETENTION: Final = ("cleanup.policy", "retention.ms", "retention.bytes")

_AGAIN: Final = 0.2
"""Seconds until a repeated request after an error of ``LEADER_MOVES``."""

_SHOWN: Final = 5
"""Maximum number of broker addresses to show."""

# The client's log would appear between the printed lines; error_cb collects the client's errors.
_QUIET: Final[Mapping[str, Any]] = {"log_level": 0}


def examine(config: ClientConfig, topics: Sequence[str], *, timeout: float = QUESTION_TIMEOUT) -> list[Check]:
    """Check the settings, topics, group and broker of a consumer. If the broker check fails, no later check runs.

    The call blocks for up to ``timeout`` seconds for each request, and 10 s longer if the client fetches a token. The
    function reports an error of the client as a ``Check`` with a failed or unknown result.
    """
    try:
        # A client without a subscription checks every setting, and connects to no broker.
        Consumer({**_QUIET, **config.client}).close()
        errors: list[KafkaError] = []
        connecting: dict[str, Any] = {"logger": _Unlogged(errors), **config.admin, "error_cb": errors.append}
        admin = AdminClient(connecting)
    except (KafkaException, TypeError, ValueError) as failure:
        error, secrets = failure.args[0], config.client
        text = client_text(error, secrets) if isinstance(error, KafkaError) else redacted(str(failure), secrets)
        return [Check("client", False, text, f"correct the setting that the error names{setting_meant(text)}")]
    doctor = _Doctor(config, admin, errors, timeout)
    checks = [doctor.reachable()]
    if checks[0].ok is False:
        return checks
    for topic in topics:
        checks += doctor.topic(topic)
    checks.append(doctor.group())
    checks += doctor.broker()
    return checks


class _Unlogged:
    """The ``logger`` of a client, which writes no line, and reports errors that only a line reports."""

    def __init__(self, errors: list[KafkaError]) -> None:
        self._errors = errors

    def log(self, level: int, template: str, *values: object) -> None:
        if values and (error := closed_at_first_request(str(values[-1]))) is not None:
            self._errors.append(error)


@dataclass(eq=False, repr=False)
class _Doctor:
    config: ClientConfig
    admin: AdminClient
    errors: list[KafkaError]
    timeout: float

    def reachable(self) -> Check:
        deadline = time.monotonic() + self.timeout
        future = self.admin.describe_cluster(request_timeout=self.timeout)
        try:
            cluster = answer(self.admin, future, deadline, lambda: any(map(is_login_refused, self.errors)))
        except KafkaException as failure:
            error = likely_cause(failure.args[0], self.errors)
            where = addresses(self.config.admin)
            found = f"{where}: {client_text(error, self.config.admin)}"
            return Check("broker", False, found, _remedy_of_reaching(error, address_name(self.config.admin)))
        nodes = ", ".join(f"{node.host}:{node.port}" for node in cluster.nodes[:_SHOWN])
        more = f" and {len(cluster.nodes) - _SHOWN} more" if len(cluster.nodes) > _SHOWN else ""
        return Check("broker", True, f"{nodes}{more}, cluster {cluster.cluster_id}")

    def topic(self, name: str) -> list[Check]:
        what = f"topic {name}"
        try:
            asked = self.admin.describe_topics(
                TopicCollection([name]), include_authorized_operations=True, request_timeout=self.timeout
            )
            found = self._ask(asked[name])
        except (KafkaException, ValueError, TypeError) as failure:
            error = failure.args[0]
            missing = isinstance(error, KafkaError) and error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART
            similar = similar_topic(self.admin, name, timeout=self.timeout) if missing else ""
            create = f"create topic {name}, or correct the name{similar}"
            return [self._failed(what, failure, f"allow Describe and Read on topic {name}", create)]
        partitions = f"partitions={len(found.partitions)}, id {found.topic_id}"
        leaderless = [each.id for each in found.partitions if each.leader is None or each.leader.id < 0]
        if not _allowed(found, AclOperation.READ):
            return [Check(what, False, f"{partitions}; this user may not read it", f"allow Read on topic {name}")]
        if leaderless:
            waiting = f"{partitions}; partitions {leaderless} have no leader"
            return [Check(what, False, waiting, "wait for the brokers of these partitions, or start them")]
        numbers = [each.id for each in found.partitions]
        return [Check(what, True, partitions), self._retention(name), self._transactions(name, numbers)]

    def _retention(self, topic: str) -> Check:
        what = f"retention of {topic}"
        try:
            found = settings_of(self.admin, ResourceType.TOPIC, topic, self._deadline())
        except KafkaException as failure:
            return self._unknown(what, failure, f"allow DescribeConfigs on topic {topic} to see the retention")
        return Check(what, True, ", ".join(f"{name}={found[name]}" for name in _RETENTION if name in found))

    def _transactions(self, topic: str, numbers: Sequence[int]) -> Check:
        """Check for messages that an open transaction hides: messages between the last stable offset and the end."""
        what = f"transactions on {topic}"
        try:
            stable, ends = (
                self._ends(topic, numbers, level)
                for level in (IsolationLevel.READ_COMMITTED, IsolationLevel.READ_UNCOMMITTED)
            )
        except KafkaException as failure:
            return self._unknown(what, failure, f"allow Describe on topic {topic} to see open transactions")
        level = self.config.client.get("isolation.level", "read_committed")
        held = {number: ends[number] - stable[number] for number in numbers if ends[number] > stable[number]}
        if not held:
            return Check(what, True, f"isolation.level={level}; no open transaction holds messages back")
        most = max(held, key=lambda number: held[number])
        return Check(
            what,
            None,
            f"isolation.level={level}; open transactions hold back {sum(held.values())} messages in {len(held)} "
            f"partitions, most in partition {most}: {held[most]}",
            "wait until the producer commits; if the messages stay, find the producer that hangs or died",
        )

    def _ends(self, topic: str, numbers: Sequence[int], level: IsolationLevel) -> dict[int, int]:
        latest: OffsetSpec = OffsetSpec.latest()  # type: ignore[no-untyped-call]
        wanted = {TopicPartition(topic, number): latest for number in numbers}
        deadline = self._deadline()
        while True:
            asked = self.admin.list_offsets(wanted, isolation_level=level, request_timeout=self.timeout)
            try:
                return {where.partition: answer(self.admin, future, deadline).offset for where, future in asked.items()}
            except KafkaException as failure:
                if failure.args[0].code() not in LEADER_MOVES or time.monotonic() + _AGAIN > deadline:
                    raise
            time.sleep(_AGAIN)

    def group(self) -> Check:
        group = self.config.group
        what = f"group {group}"
        allow = f"allow Read on group {group}"
        try:
            asked = self.admin.describe_consumer_groups(
                [group], include_authorized_operations=True, request_timeout=COORDINATOR_TIMEOUT
            )
            found = self._ask(asked[group])
        except (KafkaException, ValueError, TypeError) as failure:
            return self._failed(what, failure, allow, "start a first member", absent=True)
        if not _allowed(found, AclOperation.READ):
            return Check(what, False, "this user may describe the group, but may not join it", allow)
        kind, state = found.type.name.lower(), found.state.name.lower()
        if not found.members and state == "dead" and self._is_of_another_kind():
            return Check(
                what,
                False,
                "the group exists and is not a consumer group; it is probably a share group, which has no order",
                "use another group.id",
            )
        if not found.members:
            return Check(what, True, "no members" + ("" if state == "dead" else f", {state}, {kind}"))
        instances = sorted(str(one.group_instance_id) for one in found.members if one.group_instance_id)
        static = f", static: {', '.join(instances)}" if instances else ""
        detail = f"{state}, {kind}, assignor {found.partition_assignor}, members={len(found.members)}{static}"
        return self._joinable(Check(what, True, detail), kind, found.partition_assignor, instances)

    def _is_of_another_kind(self) -> bool:
        """Return whether the broker lists a group that the broker described as missing."""
        with warnings.catch_warnings():
            # This deprecated call also lists groups of other kinds. Its replacement lists only consumer groups.
            warnings.simplefilter("ignore", DeprecationWarning)
            try:
                listed = self.admin.list_groups(timeout=self.timeout)
            except KafkaException:
                return False
        return any(each.id == self.config.group for each in listed)

    def _joinable(self, found: Check, kind: str, assignor: str, instances: Sequence[str]) -> Check:
        protocol, instance = self.config.protocol, self.config.instance
        if (kind == "consumer") != (protocol == "848"):
            ok, fault = None, "this configuration uses the other rebalance protocol"
            remedy = "stop every member before the protocol changes, or see group.consumer.migration.policy"
        elif protocol != "848" and (assignor == "cooperative-sticky") != (protocol == "cooperative"):
            ok, fault = False, "this configuration names the other kind of assignor (cooperative or eager)"
            remedy = "set the group's partition.assignment.strategy, or stop every member before the strategy changes"
        elif instance in instances:
            ok, fault = None, f"{instance} is a member already"
            remedy = "give each process a group.instance.id of its own, unless that member is this running service"
        else:
            return found
        return found._replace(ok=ok, detail=f"{found.detail}; {fault}", remedy=remedy)

    def broker(self) -> list[Check]:
        """Check the broker's settings for commit metadata, and for KIP-848 if the configuration uses it."""
        what = "commit metadata"
        try:
            found = broker_settings(self.admin, timeout=self.timeout)
        except SourceError as failure:
            return [Check(what, None, str(failure), "run the command again")]
        if not found:
            unknown = "this user may not read a broker's settings"
            remedy = "allow DescribeConfigs on the cluster, and run the command again"
            checks = [Check(what, None, unknown, remedy)]
            return [*checks, Check("KIP-848", None, unknown, remedy)] if self.config.protocol == "848" else checks
        checks = [_carries(what, found.get(METADATA_LIMIT))]
        if self.config.protocol == "848":
            checks.append(_supports_848(found))
        return checks

    def _ask(self, future: Future[Any]) -> Any:
        return answer(self.admin, future, self._deadline())

    def _deadline(self) -> float:
        return time.monotonic() + self.timeout

    def _failed(self, what: str, failure: Exception, allow: str, create: str, *, absent: bool = False) -> Check:
        """Return the check of a failed request. With ``absent``, a missing topic or group passes the check."""
        error = failure.args[0]
        if not isinstance(error, KafkaError):
            return Check(what, False, str(failure), "correct the name")
        if error.code() in (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError.GROUP_ID_NOT_FOUND):
            return Check(what, True, "no members") if absent else Check(what, False, "it does not exist", create)
        remedy = allow if error.code() in NOT_ALLOWED else "correct the named cause, and run the command again"
        return Check(what, False, client_text(error, self.config.admin), remedy)

    def _unknown(self, what: str, failure: KafkaException, remedy: str) -> Check:
        return Check(what, None, client_text(failure.args[0], self.config.admin), remedy)


def _carries(what: str, limit: str | None) -> Check:
    if limit is None:
        return Check(
            what,
            None,
            f"the broker does not report its {METADATA_LIMIT}",
            "no action: the first commit of lanes shows the limit",
        )
    if can_carry(room_within(int(limit))):
        return Check(what, True, f"{METADATA_LIMIT}={limit}")
    return Check(
        what,
        None,
        f"{METADATA_LIMIT}={limit}: a commit has no room to list messages completed above its position",
        "raise it to 4096 at the broker, or pass commit_metadata=False; drains then take longer",
    )


def _supports_848(settings: Mapping[str, str]) -> Check:
    protocols = settings.get(_PROTOCOLS)
    if protocols is not None and "consumer" in protocols.split(","):
        return Check("KIP-848", True, f"{_PROTOCOLS}={protocols}")
    found = "the broker has no such setting" if protocols is None else f"the broker has {protocols!r}"
    return Check(
        "KIP-848",
        False,
        f"group.protocol='consumer' needs 'consumer' in {_PROTOCOLS}: {found}",
        "use Kafka 4.0 or newer, or leave group.protocol out",
    )


def _allowed(found: Any, operation: AclOperation) -> bool:
    """Return whether this user may perform an operation.

    If a broker is too old to report permissions, the operation counts as allowed.
    """
    return found.authorized_operations is None or operation in found.authorized_operations


def _remedy_of_reaching(error: KafkaError, address: str) -> str:
    if is_login_refused(error):
        return "correct sasl.mechanism, sasl.username, sasl.password and security.protocol"
    if error.code() == KafkaError._SSL or "SSL" in error.str() or "TLS" in error.str():
        return "correct security.protocol and the ssl settings"
    return f"correct {address}, security.protocol, the firewall, or the advertised listener"
