"""Owners, removals and rebalances of a group follow from the broker's descriptions of the group."""

from __future__ import annotations

from math import inf

import pytest

from demo.membership import Member, Removal, Snapshot, Span, last_owners, rebalances, removals, spans
from tests.memsource.checkers.rows import assigned, at, owned, parsed, segment

ONE = ("m-1", "S/0", 1)


def look(asked: float, state: str = "STABLE", **members: str) -> Snapshot:
    """Return the group as described from ``asked`` to 0.1 s later; a member has the form ``m_1="id-a:0,1"``."""
    found = {}
    for name, text in members.items():
        number, _, partitions = text.partition(":")
        owned = frozenset(("S", int(one)) for one in partitions.split(",") if one)
        found[name.replace("_", "-")] = Member(number, owned)
    return Snapshot(asked, asked + 0.1, state, found)


@pytest.mark.parametrize(
    ("rows", "end", "span"),
    [
        ([at(101.0, assigned()), at(102.0, owned("revoked"))], "drained", Span(101.0, 102.0, "revoked")),
        ([at(101.0, assigned()), at(102.0, owned("lost"))], "drained", Span(101.0, 102.0, "lost")),
        ([at(101.0, assigned())], None, Span(101.0, inf, "crashed")),
        ([at(101.0, assigned())], "failed", Span(101.0, inf, "")),
    ],
    ids=["revoked", "lost", "crashed", "failed"],
)
def test_the_spans_of_owners_follow_from_the_histories(
    rows: list[list[dict[str, object]]], end: str | None, span: Span
) -> None:
    assert spans(parsed(segment(*rows, end=end))) == {ONE: span}


@pytest.mark.parametrize(
    ("span", "looks", "removal"),
    [
        (Span(1.0, inf, "crashed"), [look(2.0, m_1="a:0"), look(3.0)], Removal(2.0, 3.1)),
        # A classic member that joined again has another id.
        (Span(1.0, inf, ""), [look(2.0, m_1="a:0"), look(3.0, m_1="b:0")], Removal(2.0, 3.1)),
        (Span(1.0, inf, ""), [look(2.0, m_1="a:0"), look(3.0, m_1="a:0")], None),
        # The member released the partition, or knew of its loss, before the removal.
        (Span(1.0, 2.5, "revoked"), [look(2.0, m_1="a:0"), look(3.0)], None),
        (Span(1.0, 3.2, "lost"), [look(2.0, m_1="a:0"), look(3.0)], Removal(2.0, 3.1)),
        # The member was assigned the partition after the first description.
        (Span(2.05, inf, ""), [look(2.0, m_1="a:"), look(3.0)], None),
        # A broker reports DEAD for a group that it has not loaded yet.
        (Span(1.0, inf, ""), [look(2.0, m_1="a:0"), look(3.0, "DEAD"), look(4.0, m_1="a:0")], None),
        # The partition of another member.
        (Span(1.0, inf, ""), [look(2.0, m_1="a:0", m_2="b:1"), look(3.0, m_1="a:0")], None),
    ],
    ids=["gone", "again", "there", "gave back", "heard later", "came later", "not loaded", "another"],
)
def test_removals_of_members_are_found(span: Span, looks: list[Snapshot], removal: Removal | None) -> None:
    assert removals({ONE: span}, looks) == ({} if removal is None else {ONE: removal})


@pytest.mark.parametrize(
    ("looks", "count"),
    [
        ([look(1.0, m_1="a:0,1"), look(2.0, m_1="a:0,1")], 0),
        ([look(1.0, m_1="a:0,1"), look(2.0, m_1="a:0", m_2="b:1")], 1),
        ([look(1.0, m_1="a:0,1"), look(2.0, "RECONCILING", m_1="a:0"), look(3.0, m_1="a:0,1")], 0),
        ([look(1.0), look(2.0, m_1="a:0"), look(3.0, m_2="b:0"), look(4.0, m_1="a:0")], 2),
    ],
    ids=["nothing", "one moved", "under way", "there and back"],
)
def test_rebalances_are_found(looks: list[Snapshot], count: int) -> None:
    assert rebalances(looks) == count


def test_the_last_owner_of_each_partition_is_known() -> None:
    looks = [
        look(1.0, m_1="a:0,1"),
        look(2.0, m_1="a:0", m_2="b:1"),
        look(3.0, m_1="a:0", m_2="b:1"),
        look(4.0, "RECONCILING", m_1="a:", m_2="b:0,1"),
        look(5.0, "EMPTY"),
    ]
    assert last_owners(looks) == {"S/0": ("m-1", 1.1), "S/1": ("m-2", 2.1)}
    assert last_owners([*looks, look(6.0, m_2="b:0"), look(7.0, m_2="b:0")]) == {"S/0": ("m-2", 6.1)}


def test_a_group_is_stable_when_every_member_owns_what_it_was_told() -> None:
    stable = look(1.0, m_1="a:0,1", m_2="b:2")
    assert stable.stable and not look(1.0, "ASSIGNING", m_1="a:0").stable
    assert stable.owners == {("S", 0): "m-1", ("S", 1): "m-1", ("S", 2): "m-2"}
