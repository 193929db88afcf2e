"""The records of a cohort's bucket: their keys, and their values as JSON.

| key | value | expires |
|---|---|---|
| ``config`` | ``CohortConfig``, never changed | no |
| ``plan`` | ``PlanRecord`` | no |
| ``m.<member>`` | ``Heartbeat`` | yes |
| ``l.<partition>`` | ``Lease`` | yes |
| ``s.<partition>`` | ``State`` | no |
| ``drain.<member>`` | ``DrainRequest`` of an operator | no |

Some fields have another name in JSON, because earlier versions of ``lanes`` read and write that name.

Other programs may write to the bucket. For a value that ``lanes`` cannot have written, ``decode`` raises a
``ValueError`` with the key and the remedy.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import Field, asdict, dataclass, field, fields
from functools import partial
from typing import Any, Final, TypeVar

from lanes.core.cohort.ledger import SHOWN, Done, decode_done, encode_done, shown

VERSION: Final = 1

CONFIG_KEY: Final = "config"
PLAN_KEY: Final = "plan"
MEMBER_PREFIX: Final = "m."
LEASE_PREFIX: Final = "l."
STATE_PREFIX: Final = "s."
DRAIN_PREFIX: Final = "drain."

HIGHEST: Final = 2**53
"""Highest number in a record, except in a ledger. Some JSON readers change higher numbers.

A clock in milliseconds reaches this number after 285,000 years.
"""

DEFAULT_NAME: Final = "default"
"""Name of a cohort whose first member has no name for it."""

_NAME: Final = re.compile(r"[A-Za-z0-9_=-]+(\.[A-Za-z0-9_=-]+)*")
_NAME_LIMIT: Final = 128
_BEFORE: Final = 20
"""Number of characters shown before the first difference of two long texts."""


@dataclass(frozen=True, slots=True)
class CohortConfig:
    """The settings that a cohort never changes.

    Every joining member compares all settings but ``start`` with its own settings.

    A field is ``None``, and is not compared, if an earlier version of ``lanes`` wrote the record without the field.

    Attributes:
        cohort: Name of the cohort. A member whose setting is None joins a cohort of any name.
        partitions: Number of cohort partitions.
        choice: Origin of the cohort partitions: ``transform`` (a transform of the stream), ``created`` (with the
            stream) or ``sourced`` (from another stream).
        detail: Details of ``choice`` as text, such as the destination of the transform.
        tokens: Numbers of the subject tokens that make the key, from 1.
        incarnation: Text that distinguishes a recreated stream from the former stream.
        retention: Retention of the stream.
        start: The user's ``start`` as text: the position in the stream at which the cohort begins.
        stream: Name of the stream.
        namespace: Namespace of the cohort.
        lease: Length of every member's leases in seconds.
    """

    cohort: str | None
    partitions: int
    choice: str
    detail: str
    tokens: tuple[int, ...]
    incarnation: str
    retention: str
    start: str
    stream: str | None = None
    namespace: str | None = None
    lease: int | None = None


@dataclass(frozen=True, slots=True)
class PlanRecord:
    """The current plan.

    Attributes:
        generation: Number of the plan, which increases at each change of owners or standbys.
        owners: Member that owns each partition; None = no owner.
        members: Live members, sorted.
        standbys: Live members that own no partition and do not drain, sorted.
        active_members: Maximum number of members that own partitions; None = all members.
        too_few_members: Whether the number of live members that do not drain is below ``active_members``.
        under_provisioned: Whether a member owns more partitions than its target.
        default_consumer_target: Target of each member without its own target; None = no target.
        rules: Version of the plan rules that the plan follows. An earlier version of ``lanes`` writes no version, and
            follows version 0.
    """

    generation: int
    owners: tuple[str | None, ...]
    members: tuple[str, ...]
    standbys: tuple[str, ...]
    active_members: int | None = field(metadata={"json": "target"})
    too_few_members: bool = field(metadata={"json": "under_provisioned"})
    under_provisioned: bool = field(default=False, metadata={"json": "over_target", "optional": True})
    default_consumer_target: int | None = None
    rules: int = field(default=0, metadata={"optional": True})


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A live member.

    Attributes:
        nonce: Random text that identifies the process. If two heartbeats of one name have different nonces, two
            processes use the same member id.
        weight: Weight of the member, 1 or more.
        active_members: Maximum number of members that own partitions. ``None`` = all members.
        session: Time of the join in milliseconds since 1970, by the member's clock. The ``active_members`` of the
            member with the latest ``session`` applies.
        lease: Seconds until the heartbeat expires. ``None`` = an earlier version of ``lanes`` wrote the heartbeat.
        consumer_target: Largest number of partitions that the member prefers to own. ``None`` = the default applies.
        default_consumer_target: Target of each member without its own target. ``None`` = no target.
        rules: Highest version of the plan rules that the member supports. An earlier version of ``lanes`` writes no
            version, and supports version 0.
    """

    nonce: str
    weight: int
    active_members: int | None = field(metadata={"json": "target"})
    session: int
    lease: int | None = None
    consumer_target: int | None = None
    default_consumer_target: int | None = None
    rules: int = field(default=0, metadata={"optional": True})


@dataclass(frozen=True, slots=True)
class Lease:
    """The lease of a partition.

    Attributes:
        member: Member that holds the lease.
        nonce: Random text that identifies the acquisition.
        epoch: Epoch of the acquisition. ``None`` = not chosen yet.
        released: Whether the member has released the lease.
    """

    member: str
    nonce: str
    epoch: int | None = None
    released: bool = False


@dataclass(frozen=True, slots=True)
class State:
    """The last epoch and the done sequences of a partition. The record remains after a lease expires."""

    epoch: int
    done: Done


@dataclass(frozen=True, slots=True)
class DrainRequest:
    """The request that a member owns no partition while another live member does not drain.

    Attributes:
        since: Time of the request in milliseconds since 1970.
    """

    since: int


Record = CohortConfig | PlanRecord | Heartbeat | Lease | State | DrainRequest
_R = TypeVar("_R", bound=Record)


def lease_key(partition: int) -> str:
    """Return the key of a partition's lease."""
    return f"{LEASE_PREFIX}{partition}"


def state_key(partition: int) -> str:
    """Return the key of a partition's state."""
    return f"{STATE_PREFIX}{partition}"


def member_key(member: str) -> str:
    """Return the key of a member's heartbeat. Raises ``ValueError`` for an invalid name."""
    return MEMBER_PREFIX + check_name("member", member)


def drain_key(member: str) -> str:
    """Return the key of the request to drain a member. Raises ``ValueError`` for an invalid name."""
    return DRAIN_PREFIX + check_name("member", member)


def check_name(what: str, name: str) -> str:
    """Return a name that may be part of a key. Raises ``ValueError`` for an invalid name."""
    if len(name) > _NAME_LIMIT or _NAME.fullmatch(name) is None:
        raise ValueError(
            f"the {what} name cannot be part of a key; use letters, digits, '_', '-' and '=', with single dots between "
            f"them, at most {_NAME_LIMIT} characters"
        )
    return name


def encode(record: Record) -> bytes:
    """Return the value of a record."""
    content: dict[str, Any] = {"version": VERSION}
    if isinstance(record, State):
        content |= {"epoch": record.epoch, "done": encode_done(record.done)}
    else:
        named = {each.name: _json_name(each) for each in fields(record)}
        content |= {named[name]: value for name, value in asdict(record).items()}
    return json.dumps(content, separators=(",", ":")).encode()


def decode(kind: type[_R], key: str, value: bytes) -> _R:
    """Return the record in a value.

    Raises ``ValueError`` with the key and the remedy for a value that ``encode`` does not return, or that has another
    ``version``. The call ignores unknown fields.
    """
    try:
        content = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise _not_ours(key, value, f"not JSON ({type(error).__name__})") from None
    if not isinstance(content, dict):
        raise _not_ours(key, value, "not an object")
    version = content.get("version")
    if version != VERSION:
        raise _not_ours(key, value, f"version {shown(version)}, but this program supports version {VERSION}")
    found: dict[str, Any] = {}
    for each in fields(kind):
        name = _json_name(each)
        if name not in content and "optional" in each.metadata:
            continue
        try:
            found[each.name] = _CHECKS[str(each.type)](content.get(name))
        except ValueError as error:
            raise _not_ours(key, value, f"{name}: {error}") from None
    return kind(**found)


def difference(found: CohortConfig, wanted: CohortConfig) -> str | None:
    """Return the differences between the settings of a joining member and the cohort, and the remedy, or None."""
    differing = {
        each.name: "{} is {}, this member has {}".format(each.name, *_apart(there, here))
        for each in fields(CohortConfig)
        if each.name != "start"
        and (there := getattr(found, each.name)) != (here := getattr(wanted, each.name))
        and not (each.default is None and None in (there, here))
        and not (each.name == "cohort" and here is None)
    }
    if not differing:
        return None
    said = "; ".join(differing.values())
    if differing.keys() & {"stream", "namespace"}:
        return f"the bucket belongs to another cohort, {found.cohort!r}: {said}. Use another namespace for this cohort"
    where = f" (stream {wanted.stream!r}, namespace {wanted.namespace!r})" if wanted.stream is not None else ""
    said = f"the cohort {found.cohort!r} has other settings{where}: {said}. "
    if "incarnation" in differing:
        return (
            f"{said}The stream was deleted and created again, so its sequences mean other messages. If that was "
            "intended, stop all members, delete the cohort's bucket, and start them again; or give this member another "
            "namespace"
        )
    said += "Give this member the same settings, or another namespace for a cohort of its own"
    if differing.keys() & {"partitions", "choice", "detail", "tokens"}:
        said += (
            ". If the stream is now divided differently, divide it as before: stored messages keep their partition, "
            "and a key in two partitions has two owners"
        )
    if "lease" in differing:
        said += (
            f". To change the lease of all members, stop them, delete the key {CONFIG_KEY!r} of the cohort's bucket, "
            "and start them with the new lease"
        )
    return said


def _json_name(each: Field[Any]) -> str:
    return str(each.metadata.get("json", each.name))


def _not_ours(key: str, value: bytes, why: str) -> ValueError:
    return ValueError(
        f"the key {key!r} of the cohort's bucket holds {shown(value)}: {why}. Run the same version of lanes on every "
        "member, and let no other program write to the bucket; restore a damaged record by hand"
    )


def _apart(one: object, other: object) -> tuple[str, str]:
    """Return two differing values as shortened texts that both show the difference."""
    begin = 0
    if isinstance(one, str) and isinstance(other, str) and max(len(one), len(other)) >= SHOWN:
        pairs = enumerate(zip(one, other, strict=False))
        same = next((index for index, (here, there) in pairs if here != there), min(len(one), len(other)))
        begin = max(0, same - _BEFORE)
        one, other = one[begin:], other[begin:]
    more = "…" if begin else ""
    return more + shown(one), more + shown(other)


def _of_type(kind: type, name: str, value: object) -> Any:
    """Check the type of a JSON value."""
    if not isinstance(value, kind):
        raise ValueError(f"expected {name}, got {shown(value)}")
    return value


_text: Final = partial(_of_type, str, "text")
_items: Final = partial(_of_type, list, "a list")


def _whole(value: object) -> int:
    # A bool is an int to isinstance.
    if type(value) is not int or not 0 <= value <= HIGHEST:
        raise ValueError(f"expected a whole number from 0 to {HIGHEST}, got {shown(value)}")
    return value


_CHECKS: Final[dict[str, Callable[[object], Any]]] = {
    "str": _text,
    "str | None": lambda value: None if value is None else _text(value),
    "int": _whole,
    "bool": partial(_of_type, bool, "true or false"),
    "int | None": lambda value: None if value is None else _whole(value),
    "tuple[int, ...]": lambda value: tuple(_whole(item) for item in _items(value)),
    "tuple[str, ...]": lambda value: tuple(_text(item) for item in _items(value)),
    "tuple[str | None, ...]": lambda value: tuple(None if item is None else _text(item) for item in _items(value)),
    "Done": decode_done,
}
"""The function that checks and converts a JSON value, by the annotation of its field."""
