"""What a member says of its cohort: which it is, who it is itself, and how partitions move."""

from __future__ import annotations

import os
import re
import socket
from dataclasses import KW_ONLY, dataclass
from typing import Final, Literal

from lanes.cohort.membership import CohortSettings
from lanes.core.cohort.records import check_name
from lanes.errors import ConfigError
from lanes_jetstream.cohort.stream import CohortStream

__all__ = ["Cohort", "bucket_name", "namespace_of"]

_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")


def bucket_name(stream: str, namespace: str) -> str:
    """What the bucket of a cohort on a stream is called; no two cohorts have the same.

    ``lanes_<stream>_<namespace>``. A stream has underscores, too: where the namespace has one its length says where it
    begins, ``lanes-<length>_<stream>_<namespace>``.
    """
    return f"lanes-{len(namespace)}_{stream}_{namespace}" if "_" in namespace else f"lanes_{stream}_{namespace}"


def namespace_of(bucket: str, stream: str) -> str | None:
    """The namespace of the cohort on a stream whose bucket is called so; None = it is not one on that stream."""
    named = re.fullmatch(rf"lanes(?:-[0-9]+)?_{re.escape(stream)}_({_NAME.pattern})", bucket)
    return named[1] if named is not None and bucket_name(stream, named[1]) == bucket else None


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
            if not isinstance(name, str) or not _NAME.fullmatch(name):
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
