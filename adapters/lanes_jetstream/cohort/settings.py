"""The settings of a member of a cohort, and the settings of a stream that the member creates."""

from __future__ import annotations

import os
import re
import socket
from dataclasses import KW_ONLY, dataclass
from typing import Any, Final, Literal

from lanes.arguments import check_flag, check_one_of, check_whole, names_unknown_options, shown_value
from lanes.cohort.membership import CohortSettings
from lanes.core.cohort.records import check_name
from lanes.errors import ConfigError
from lanes_jetstream.cohort.partitioning import MANAGED
from lanes_jetstream.wire.subjects import is_subject

NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""The valid names of cohorts and namespaces."""


@names_unknown_options("CohortStream")
@dataclass(frozen=True, kw_only=True, slots=True)
class CohortStream:
    """The stream that a member creates for a cohort if no stream with the name exists.

    The first token of the stored subject is the partition. Handlers and ``key=`` see the stored subject. For example,
    the stream stores ``orders.42.paid`` of partition 17 as ``17.orders.42.paid``, so ``subject_token(2)`` is ``42``.

    Attributes:
        subject: Pattern of the published subjects, such as ``"orders.*.>"``.
        tokens: Indices of the tokens of ``subject`` that select the partition, from 0; each selected token must be a
            ``*``. By default the whole subject selects the partition. A ``subject`` that ends with ``>`` then needs
            nats-server 2.12 or newer.
        origin: Name of an existing stream that the new stream sources; None = clients publish to the new stream.
        retention: Retention of the stream. ``"workqueue"`` removes each finished message.
        replicas: Number of copies, 1 to 5.
        storage: Storage of the stream, ``"file"`` or ``"memory"``.

    Raises:
        ConfigError: A value is invalid.
    """

    subject: str
    tokens: tuple[int, ...] | None = None
    origin: str | None = None
    retention: Literal["limits", "workqueue", "interest"] = "workqueue"
    replicas: int = 1
    storage: Literal["file", "memory"] = "file"

    def __post_init__(self) -> None:
        if not is_subject(self.subject):
            raise ConfigError(
                f"CohortStream(subject={shown_value(self.subject)}): has an empty token, a space, or a > before the "
                "end; separate tokens by single dots, and use > only as the last token"
            )
        parts = self.subject.split(".")
        if "*" not in parts and ">" not in parts:
            raise ConfigError(
                f"CohortStream(subject={shown_value(self.subject)}): has no wildcard, so all messages would be in one "
                "partition; add a wildcard"
            )
        if self.tokens is not None and (not isinstance(self.tokens, tuple | list) or not self.tokens):
            raise ConfigError(
                f"CohortStream(tokens={shown_value(self.tokens)}): must be a tuple of numbers such as (1,), or None"
            )
        for token in self.tokens or ():
            if type(token) is not int or not 0 <= token < len(parts) or parts[token] != "*":
                raise ConfigError(
                    f"CohortStream(tokens={shown_value(self.tokens)}): token {shown_value(token)} of "
                    f"{shown_value(self.subject)} is not a *; use indices of *"
                )
        if self.origin is not None and (not isinstance(self.origin, str) or not self.origin):
            raise ConfigError(f"CohortStream(origin={shown_value(self.origin)}): must be the name of a stream, or None")
        check_one_of("CohortStream.retention", self.retention, ("limits", "workqueue", "interest"))
        if type(self.replicas) is not int or not 1 <= self.replicas <= 5:
            raise ConfigError(f"CohortStream(replicas={shown_value(self.replicas)}): must be 1 … 5")
        check_one_of("CohortStream.storage", self.storage, ("file", "memory"))

    def transform(self, partitions: int) -> dict[str, str]:
        """Return the server's transform from published to stored subjects.

        Args:
            partitions: Number of cohort partitions, 1 or more.

        Returns:
            The fields ``src`` and ``dest`` of a stream's ``subject_transform``.
        """
        parts = self.subject.split(".")
        stars = [place for place, part in enumerate(parts) if part == "*"]
        wildcards = {place: number for number, place in enumerate(stars, 1)}
        # Hash the whole subject if its length varies. Otherwise the texts of the wildcards identify the subject.
        hashed = [] if self.tokens is None and parts[-1] == ">" else stars if self.tokens is None else self.tokens
        stored = [f"{{{{wildcard({wildcards[n]})}}}}" if n in wildcards else part for n, part in enumerate(parts)]
        arguments = ",".join(map(str, [partitions, *(wildcards[place] for place in hashed)]))
        return {"src": self.subject, "dest": ".".join([f"{{{{partition({arguments})}}}}", *stored])}

    def config(self, name: str, partitions: int) -> dict[str, Any]:
        """Return the configuration of the stream to create.

        Args:
            name: Name of the stream.
            partitions: Number of cohort partitions, 1 or more.

        Returns:
            The fields of a ``STREAM.CREATE`` request.
        """
        config: dict[str, Any] = {
            "name": name,
            "retention": self.retention,
            "storage": self.storage,
            "num_replicas": self.replicas,
            "discard": "old",
            "metadata": {MANAGED: "1"},
        }
        transform = self.transform(partitions)
        if self.origin is None:
            return config | {"subjects": [self.subject], "subject_transform": transform}
        return config | {"sources": [{"name": self.origin, "subject_transforms": [transform]}]}


@names_unknown_options("Cohort")
@dataclass(frozen=True, slots=True)
class Cohort:
    """An exclusive cohort: each cohort partition of the stream has one owner among its members at a time.

    Attributes:
        name: Name of the cohort, the same for all members; None = the member joins the cohort of the namespace, or
            creates a cohort ``"default"``.
        member: Id of this process, unique in the cohort; None = host name and process id. If a process was killed and
            starts again with the same id, it waits until its earlier lease has expired.
        namespace: Namespace of the cohort. Each namespace of a stream has one cohort. Each of these cohorts reads all
            messages.
        partitions: Number of cohort partitions, 1 or more; None = 64 for a new stream, and the number of an existing
            stream. More than 256 partitions need ``many_partitions=True``.
        many_partitions: Whether more than 256 partitions are permitted.
        create: The stream that the member creates if no stream with the name exists; None = the stream must exist.
        key_refines_partition: Promise that each key of a header or function ``key=`` occurs in one partition only. Each
            process stores 100,000 keys, and stops if a stored key arrives in another partition. Above 100,000 keys, the
            process warns once, and discards the oldest keys. The check does not find a key that two members receive.
        lease: Lease time in whole seconds, 3 or more. After this time, other members receive the partitions of a dead
            member.
        weight: Share of the partitions relative to the other members, 1 or more.
        active_members: Number of members that share the partitions, 1 or more; None = all members. Further members
            are standbys.
        consumer_target: Largest number of partitions that this member prefers to own, 1 or more; None =
            ``default_consumer_target``. Every partition needs an owner. A member therefore exceeds its target if the
            other members cannot take more partitions.
        default_consumer_target: Target of each member without its own ``consumer_target``, 1 or more; None = no target.
            The cohort uses the value of the member that joined last.
        drain_within: Seconds after which the drain of a moving partition is overdue, more than 0.
        overdue: Reaction to an overdue drain. ``"keep"`` warns, and the next owner waits. ``"force"`` cancels the
            running handlers, stores the finished messages, and moves the partition.

    Raises:
        ConfigError: A value is invalid.
    """

    name: str | None = None
    _: KW_ONLY
    member: str | None = None
    namespace: str = "lanes"
    partitions: int | None = None
    many_partitions: bool = False
    create: CohortStream | None = None
    key_refines_partition: bool = False
    lease: float = 10.0
    weight: int = 1
    active_members: int | None = None
    consumer_target: int | None = None
    default_consumer_target: int | None = None
    drain_within: float = 30.0
    overdue: Literal["keep", "force"] = "keep"

    def __post_init__(self) -> None:
        for setting, name in (("cohort", self.name), ("namespace", self.namespace)):
            if (setting, name) == ("cohort", None):
                continue
            if not isinstance(name, str) or not NAME.fullmatch(name):
                raise ConfigError(f"{setting}={shown_value(name)}: must be 1 to 64 letters, digits, - and _")
        if self.partitions is not None:
            check_whole("partitions", self.partitions, 1)
        check_flag("many_partitions", self.many_partitions)
        check_flag("key_refines_partition", self.key_refines_partition)
        if self.create is not None and not isinstance(self.create, CohortStream):
            raise ConfigError(f"create={shown_value(self.create)}: must be a CohortStream(…), or None")
        try:
            check_name("member", self.member_id)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"member={shown_value(self.member)}: {error}") from None
        _ = self.settings

    @property
    def member_id(self) -> str:
        """Id of this process in the cohort."""
        if self.member is not None:
            return self.member
        host = re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname())
        return f"{host[:100] or 'host'}-{os.getpid()}"

    @property
    def settings(self) -> CohortSettings:
        """The settings for ``lanes.cohort.membership``."""
        return CohortSettings(
            lease=self.lease,
            weight=self.weight,
            active_members=self.active_members,
            consumer_target=self.consumer_target,
            default_consumer_target=self.default_consumer_target,
            drain_within=self.drain_within,
            overdue=self.overdue,
        )
