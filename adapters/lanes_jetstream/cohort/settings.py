"""Settings of a cohort: the cohort as one member describes it, and the stream to create for it."""

from __future__ import annotations

import os
import re
import socket
from dataclasses import KW_ONLY, dataclass
from typing import Any, Final, Literal

from lanes.cohort.membership import CohortSettings
from lanes.core.cohort.records import check_name
from lanes.errors import ConfigError
from lanes_jetstream.cohort.partitioning import MANAGED

__all__ = ["Cohort", "CohortStream"]

NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""Names of cohorts and their namespaces."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CohortStream:
    """How to create the stream of a cohort, where there is none of its name.

    ``subject``: the pattern that messages are published to, such as ``"orders.*.>"``. ``tokens``: which tokens of that,
    counted from 0, make the partition; each must be a ``*``. None = the whole subject, which behind a ``>`` needs a
    server of 2.12. ``origin``: the stream to source such messages from; None = the stream takes them itself.
    ``retention``: ``"workqueue"`` = a message goes when it is finished. ``replicas``: 1 … 5. ``storage``: ``"file"`` or
    ``"memory"``.

    What is stored, and seen by handlers and by ``key=``, has the partition as its first token: ``orders.42.paid``
    becomes ``17.orders.42.paid``, so its customer is ``subject_token(2)``.
    """

    subject: str
    tokens: tuple[int, ...] | None = None
    origin: str | None = None
    retention: Literal["limits", "workqueue", "interest"] = "workqueue"
    replicas: int = 1
    storage: Literal["file", "memory"] = "file"

    def __post_init__(self) -> None:
        parts = self.subject.split(".")
        if not all(parts) or any(c.isspace() for c in self.subject) or ">" in parts[:-1]:
            raise ConfigError(
                f"CohortStream(subject={self.subject!r}): must be a subject; * and a last > are wildcards"
            )
        if "*" not in parts and ">" not in parts:
            raise ConfigError(f"CohortStream(subject={self.subject!r}): without a wildcard all of it is one partition")
        if isinstance(self.tokens, str | int) or self.tokens == ():
            raise ConfigError(f"CohortStream(tokens={self.tokens!r}): pass a tuple of numbers such as (1,), or None")
        for token in self.tokens or ():
            if not 0 <= token < len(parts) or parts[token] != "*":
                raise ConfigError(f"CohortStream(tokens={self.tokens!r}): token {token} of {self.subject!r} is no *")
        if not 1 <= self.replicas <= 5:
            raise ConfigError(f"CohortStream(replicas={self.replicas}): must be 1 … 5")

    def transform(self, partitions: int) -> dict[str, str]:
        """The server's transform from what is published to what is stored."""
        parts = self.subject.split(".")
        stars = [place for place, part in enumerate(parts) if part == "*"]
        hashed = stars if self.tokens is None else list(self.tokens)
        # Of the whole subject where it has no fixed length; else its wildcards say as much.
        numbers = [] if self.tokens is None and parts[-1] == ">" else [stars.index(place) + 1 for place in hashed]
        stored = [
            f"{{{{wildcard({stars.index(place) + 1})}}}}" if place in stars else parts[place]
            for place in range(len(parts))
        ]
        arguments = ",".join(map(str, [partitions, *numbers]))
        return {"src": self.subject, "dest": ".".join([f"{{{{partition({arguments})}}}}", *stored])}

    def config(self, name: str, partitions: int) -> dict[str, Any]:
        """What the server is asked to create."""
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


@dataclass(frozen=True, slots=True)
class Cohort:
    """An exclusive cohort: each cohort partition of the stream has one owner among its members at a time.

    ``name``: the cohort; all members say the same. ``member``: this process, one id each; after a kill the same id
    waits until its predecessor's lease has expired. None = host and process id. ``namespace``: a stream has one cohort
    in each; a second one there is refused, in another namespace it reads everything by itself.

    ``partitions``: how many the stream is divided into, where it is created (default 64); elsewhere None, or as many as
    it has. More than 256 need ``many_partitions=True``. ``create``: how to create the stream where there is none.
    ``key_refines_partition``: each key of a ``key=`` that is a header or a function comes in one partition only. That
    is the caller's promise: each process remembers 100,000 keys, and stops at one that comes to it in another
    partition; where there are more it says so once, and forgets those that came first. A key in partitions of two
    members is not seen.

    ``lease``: seconds, whole ones, 3 or more, after which the partitions of a member that has died are given to
    others. ``weight``: its share of the partitions in proportion to the others', 1 or more. ``target``: how many
    members should share them, the rest are standbys; None = all. ``drain_within``: seconds, more than 0, for one that
    moves; ``overdue``: what becomes of one that takes longer: ``"keep"`` = it is kept and warned of, whoever is to get
    it waits; ``"force"`` = what runs of it is cancelled, what is finished is written down, and it moves.

    Raises ``ConfigError`` for anything else.
    """

    name: str
    _: KW_ONLY
    member: str | None = None
    namespace: str = "lanes"
    partitions: int | None = None
    many_partitions: bool = False
    create: CohortStream | None = None
    key_refines_partition: bool = False
    lease: float = 10.0
    weight: int = 1
    target: int | None = None
    drain_within: float = 30.0
    overdue: Literal["keep", "force"] = "keep"

    def __post_init__(self) -> None:
        for setting, name in (("cohort", self.name), ("namespace", self.namespace)):
            if not isinstance(name, str) or not NAME.fullmatch(name):
                raise ConfigError(f"{setting}={name!r}: must be 1 to 64 letters, digits, - and _")
        if self.partitions is not None and (type(self.partitions) is not int or self.partitions < 1):
            raise ConfigError(f"partitions={self.partitions!r}: must be a whole number, 1 or more")
        if self.create is not None and not isinstance(self.create, CohortStream):
            raise ConfigError(f"create={self.create!r}: pass a CohortStream(…)")
        try:
            check_name("member", self.member_id)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"member={self.member!r}: {error}") from None
        _ = self.settings

    @property
    def member_id(self) -> str:
        """Who this process is."""
        if self.member is not None:
            return self.member
        host = re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname())
        return f"{host[:100] or 'host'}-{os.getpid()}"

    @property
    def settings(self) -> CohortSettings:
        """What of it the membership goes by."""
        return CohortSettings(
            lease=self.lease,
            weight=self.weight,
            target=self.target,
            drain_within=self.drain_within,
            overdue=self.overdue,
        )
