"""Scripts of the behaviour of Kafka and its client towards a member, for the personality and for a real broker.

The assignor chooses the owner of each partition, so a script asks for the owners. The observation "revoke 1" is a
callback for one partition, and an error is its code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from memsource.kafka.client import RebalanceProtocol
from tests.memsource.kafka.stage import NEW_MESSAGES, Cluster, Member, Scenario, Seen, Settings, differing, same

PATIENCE: Final = 0.6
"""Seconds without a message after which no message is expected; longer than a resumed partition needs."""

SCENARIOS: Final[list[Scenario]] = []
CASES: Final[list[tuple[Scenario, RebalanceProtocol]]] = []
"""Every script in each of its protocols."""

_USUAL: Final = Settings()

_SHORT: Final = 1.5
"""Seconds of a session that must end, and of a poll interval that must be exceeded."""


def _scenario(
    expected: Mapping[RebalanceProtocol, Seen], settings: Settings = _USUAL, *, quick: str = ""
) -> Callable[[Callable[[Cluster], Seen]], Callable[[Cluster], Seen]]:
    def register(play: Callable[[Cluster], Seen]) -> Callable[[Cluster], Seen]:
        name = play.__name__ if settings.reset == "earliest" else f"{play.__name__}_{settings.reset}"
        made = Scenario(play, settings, expected, quick.split(), name)
        SCENARIOS.append(made)
        CASES.extend((made, protocol) for protocol in expected)
        return play

    return register


def _alone(cluster: Cluster, **arguments: Any) -> Member:
    """A member that owns all partitions."""
    member = cluster.join("a", **arguments)
    cluster.until(lambda: bool(member.owned()), member)
    return member


def _two(cluster: Cluster, **arguments: Any) -> tuple[Member, Member]:
    """Two members that own a partition each; the first member owned both before."""
    first = _alone(cluster, **arguments)
    second = cluster.join("b")
    cluster.until(lambda: len(first.owned()) == len(second.owned()) == 1, first, second)
    return first, second


def _take(cluster: Cluster, member: Member, count: int, partition: int = 0) -> list[int]:
    """Wait for ``count`` messages."""
    taken: list[int] = []

    def complete() -> bool:
        taken.extend(member.taken(partition))
        return len(taken) >= count

    cluster.until(complete, member)
    return taken


def _whatever(cluster: Cluster, member: Member, partition: int = 0) -> list[int]:
    """Poll for the patience of the test, and return the events."""
    cluster.wait(PATIENCE, member)
    return member.taken(partition)


# --- commits


@_scenario(
    same(None, (3, ""), None, (7, ""), None, (2, ""), None, (1_000_000_000, "")), Settings(partitions=2), quick="848"
)
def a_commit_is_checked_neither_for_ownership_nor_for_direction(cluster: Cluster) -> Seen:
    former, owner = _two(cluster)
    (moved,) = owner.owned()
    seen: Seen = []
    for member, offset in ((owner, 3), (former, 7), (former, 2), (former, 1_000_000_000)):
        seen += [member.commit(offset, partition=moved), cluster.committed(moved)]
    return seen


@_scenario(same(None, None, "OFFSET_METADATA_TOO_LARGE", "OFFSET_METADATA_TOO_LARGE", (2, 4_094)), quick="848")
def metadata_is_bounded_in_units_of_utf_16(cluster: Cluster) -> Seen:
    member = _alone(cluster)
    seen: Seen = [
        member.commit(1, metadata=chr(0x4E00) * 4_095),
        member.commit(2, metadata=chr(0x1F600) * 2_047),
        member.commit(3, metadata=chr(0x4E00) * 4_096),
        member.commit(4, metadata=chr(0x1F600) * 2_048),
    ]
    committed = cluster.committed()
    assert committed is not None
    # Counted in UTF-16 units: a refused commit leaves the earlier commit.
    return [*seen, (committed.offset, len(committed.metadata.encode("utf-16-le")) // 2)]


@_scenario(same("OFFSET_METADATA_TOO_LARGE", (5, ""), None), Settings(partitions=2), quick="848")
def one_bad_partition_spoils_the_report_of_another_that_is_committed(cluster: Cluster) -> Seen:
    member = _alone(cluster)
    return [member.commit(5, 6, metadata="x" * 4_096), cluster.committed(0), cluster.committed(1)]


@_scenario(same([None], 2, [2, 3, 4]), Settings(partitions=2), quick="cooperative")
def what_is_committed_in_a_revoke_is_where_the_next_one_begins(cluster: Cluster) -> Seen:
    codes: list[str | None] = []
    for partition in (0, 1):
        cluster.publish(5, partition)

    def hand_over(member: Member) -> None:
        codes.append(member.commit(2, 2))

    _, owner = _two(cluster, on_revoke=hand_over)
    (moved,) = owner.owned()
    taken = _take(cluster, owner, 3, moved)
    committed = cluster.committed(moved)
    return [codes, committed and committed.offset, taken]


# --- rebalance


@_scenario(
    differing(
        eager=[["assign 2", "revoke 2", "assign 1", "revoke 1", "assign 2"], ["assign 1", "revoke 1"]],
        cooperative=[["assign 2", "revoke 1", "assign 1"], ["assign 1", "revoke 1"]],
        new=[["assign 2", "revoke 1", "assign 1"], ["assign 1", "revoke 1"]],
    ),
    Settings(partitions=2),
    quick="eager",
)
def what_a_peer_that_comes_and_goes_is_heard_of(cluster: Cluster) -> Seen:
    staying, leaving = _two(cluster)
    leaving.close()
    cluster.until(lambda: len(staying.owned()) == 2, staying)
    return [staying.heard(), leaving.heard()]


@_scenario(same([], [0, 1, 2, 3, 4]), Settings(partitions=2), quick="eager")
def a_pause_outlives_ownership(cluster: Cluster) -> Seen:
    member = _alone(cluster)
    for partition in (0, 1):
        member.pause(partition)
    peer = cluster.join("b")
    cluster.until(lambda: len(member.owned()) == len(peer.owned()) == 1, member, peer)
    (moved,) = peer.owned()
    peer.close()
    cluster.until(lambda: len(member.owned()) == 2, member)
    cluster.publish(5, moved)
    nothing = _whatever(cluster, member, moved)
    member.resume(moved)
    return [nothing, _take(cluster, member, 5, moved)]


@_scenario(same([], [0, 1, 2, 3, 4]))
def what_was_fetched_is_not_handed_out_while_it_is_paused_and_comes_afterwards(cluster: Cluster) -> Seen:
    member = _alone(cluster)
    member.pause(0)
    cluster.publish(5)
    nothing = _whatever(cluster, member)
    member.resume(0)
    return [nothing, _take(cluster, member, 5)]


@_scenario(same(1, [None], ["assign 1"]), Settings(partitions=2, session=_SHORT))
def a_revoke_may_last_longer_than_a_session(cluster: Cluster) -> Seen:
    codes: list[str | None] = []

    def linger(member: Member) -> None:
        if not codes:
            cluster.wait(2 * _SHORT, peer)
            codes.append(member.commit(1, 1))

    member = _alone(cluster, on_revoke=linger)
    peer = cluster.join("b")
    cluster.until(lambda: len(member.owned()) == len(peer.owned()) == 1, member, peer)
    return [len([each for each in member.heard() if "revoke" in each]), codes, peer.heard()]


# Whether eager expels depends on the intervals of the others.
@_scenario(
    differing(cooperative=[0, None], new=[2, "UNKNOWN_MEMBER_ID"]),
    Settings(partitions=2, session=_SHORT, poll_interval=_SHORT),
)
def a_revoke_beyond_the_poll_interval_is_fatal_to_848(cluster: Cluster) -> Seen:
    seen: Seen = []

    def linger(member: Member) -> None:
        if not seen:
            cluster.wait(3 * _SHORT, peer)
            seen.extend((len(peer.owned()), member.commit(1, 1)))

    member = _alone(cluster, on_revoke=linger)
    peer = cluster.join("b")
    cluster.until(lambda: bool(seen), member, peer)
    return seen


@_scenario(same(["assign 2", "revoke 2"], [2, "UNKNOWN_MEMBER_ID"]), Settings(partitions=2, session=_SHORT))
def heartbeats_stop_in_close(cluster: Cluster) -> Seen:
    seen: Seen = []

    def linger(member: Member) -> None:
        # Another member owns all partitions during the drain.
        cluster.until(lambda: len(peer.owned()) == 2, peer)
        seen.extend((len(peer.owned()), member.commit(1, 1)))

    member = _alone(cluster, on_revoke=linger)
    peer = cluster.join("b")
    member.close()
    return [member.heard(), seen]


# --- lost


@_scenario(
    differing(
        classic=["UNKNOWN_MEMBER_ID", 2, "UNKNOWN_MEMBER_ID", ["_MAX_POLL_EXCEEDED", "lost 1"], ["UNKNOWN_MEMBER_ID"]],
        new=[None, 1, "UNKNOWN_MEMBER_ID", ["_MAX_POLL_EXCEEDED", "lost 1"], ["UNKNOWN_MEMBER_ID"]],
    ),
    Settings(partitions=2, session=_SHORT, poll_interval=_SHORT),
)
def a_member_that_is_not_polled_hears_late_that_it_has_lost_everything(cluster: Cluster) -> Seen:
    codes: list[str | None] = []
    stuck, peer = _two(cluster, on_lost=lambda member: codes.append(member.commit(1, 1)))
    before = len(stuck.heard())
    # 848 keeps the partition for another session.
    cluster.wait(_SHORT * 5 / 3, peer)
    seen: Seen = [stuck.commit(1, 1), len(peer.owned())]
    cluster.until(lambda: len(peer.owned()) == 2, peer)
    seen.append(stuck.commit(1, 1))
    # On a busy machine the error may arrive first.
    cluster.until(lambda: bool(codes) and "_MAX_POLL_EXCEEDED" in stuck.heard(), stuck)
    return [*seen, sorted(_but_assigned(stuck.heard()[before:])), codes]


def _but_assigned(heard: Sequence[str]) -> list[str]:
    """The events without assignments, because the partition is assigned again before or after the error."""
    return [each for each in heard if not each.startswith("assign")]


@_scenario(
    differing(new=[["lost 1", "_MAX_POLL_EXCEEDED"], [None], (1, "")]),
    Settings(session=2 * _SHORT, poll_interval=_SHORT),
)
def a_commit_in_lost_is_accepted_by_848(cluster: Cluster) -> Seen:
    codes: list[str | None] = []
    stuck = _alone(cluster, on_lost=lambda member: codes.append(member.commit(1)))
    before = len(stuck.heard())
    cluster.wait(_SHORT * 5 / 3)
    cluster.until(lambda: len(stuck.heard()) >= before + 3, stuck)
    return [_but_assigned(stuck.heard()[before:]), codes, cluster.committed()]


@_scenario(same("UNKNOWN_MEMBER_ID", "lost 1"), Settings(partitions=2, session=_SHORT, apart=True))
def a_frozen_member_hears_late_that_it_has_lost_everything(cluster: Cluster) -> Seen:
    frozen, peer = _two(cluster)
    before = len(frozen.heard())
    cluster.freeze(frozen, 2 * _SHORT)
    cluster.until(lambda: len(peer.owned()) == 2, peer)
    code = frozen.commit(1, 1)
    cluster.until(lambda: len(frozen.heard()) > before, frozen)
    return [code, frozen.heard()[before]]


@_scenario(
    differing(classic=[["assign 1", "lost 1", "assign 1"], None], new=[["assign 1"], None]),
    Settings(session=_SHORT, outage=True),
)
def an_outage_of_the_broker_is_a_loss_to_classic_members_alone(cluster: Cluster) -> Seen:
    member = _alone(cluster)
    cluster.outage(member)
    cluster.until(lambda: bool(member.owned()) and member.commit(1) is None, member)
    # The client may also report once that it reaches no broker.
    return [[each for each in member.heard() if each != "_TRANSPORT"], member.commit(2)]


# --- static members


@_scenario(same(["assign 1"], ["assign 1"]), Settings(partitions=2), quick="eager")
def a_static_member_that_comes_back_moves_nothing(cluster: Cluster) -> Seen:
    member = _alone(cluster, instance="one")
    peer = cluster.join("b", instance="two")
    cluster.until(lambda: len(member.owned()) == len(peer.owned()) == 1, member, peer)
    (owned,) = member.owned()
    member.close()
    again = cluster.join("a", instance="one")
    cluster.until(lambda: again.owned() == [owned], again, peer)
    return [again.heard(), peer.heard()]


@_scenario(
    differing(
        classic=[["assign 1", "_FATAL"], [], "_FATAL", ["assign 1"], [0], None],
        new=[["assign 1"], [0], None, ["_FATAL"], [], "_FATAL"],
    ),
    quick="eager 848",
)
def of_two_static_members_of_one_name_classic_fails_the_old_one_and_848_the_new_one(cluster: Cluster) -> Seen:
    old = _alone(cluster, instance="one")
    new = cluster.join("b", instance="one")
    cluster.until(lambda: "_FATAL" in old.heard() + new.heard() and bool(old.owned() + new.owned()), old, new)
    return [old.heard(), old.owned(), old.commit(1), new.heard(), new.owned(), new.commit(1)]


# --- offsets


@_scenario(same([0, 1, 2, 5, 6], 10, None, (10, "")), quick="848")
def the_position_goes_behind_markers_and_what_was_aborted(cluster: Cluster) -> Seen:
    member = _alone(cluster)
    cluster.publish(3)
    cluster.transact(1, commit=False)
    cluster.transact(2)
    cluster.transact(1, commit=False)
    taken = _take(cluster, member, 5)
    cluster.until(lambda: member.position() == 10, member)
    return [taken, member.position(), member.commit(member.position()), cluster.committed()]


def _beyond(cluster: Cluster, offset: int) -> Seen:
    """Start a member at a position outside of the log, then publish."""
    cluster.publish(10)
    former = _alone(cluster)
    former.commit(offset)
    former.close()
    cluster.delete_records(6)
    member = cluster.join("b")
    cluster.until(lambda: bool(member.owned()), member)
    before = _whatever(cluster, member)
    cluster.publish(2)
    return [before, _whatever(cluster, member), member.heard()]


def out_of_range_below_the_log(cluster: Cluster) -> Seen:
    return _beyond(cluster, 2)


def out_of_range_beyond_the_log(cluster: Cluster) -> Seen:
    return _beyond(cluster, 99)


for _script in (out_of_range_below_the_log, out_of_range_beyond_the_log):
    _scenario(same([6, 7, 8, 9], [10, 11], ["assign 1"]))(_script)
    _scenario(same([], [10, 11], ["assign 1"]), Settings(reset="latest"))(_script)
    _scenario(same([], [], ["assign 1", "_AUTO_OFFSET_RESET"]), Settings(reset="error"), quick="848")(_script)


# --- topics


@_scenario(
    differing(
        eager=[["assign 1", "revoke 1", "UNKNOWN_TOPIC_OR_PART"], []],
        cooperative=[["assign 1", "lost 1", "UNKNOWN_TOPIC_OR_PART"], []],
        new=[["assign 1", "revoke 1"], []],
    ),
    Settings(refresh=0.5),
)
def a_topic_is_deleted(cluster: Cluster) -> Seen:
    member = _alone(cluster)
    cluster.publish(3)
    _take(cluster, member, 3)
    cluster.delete_topic()
    cluster.until(lambda: not member.owned(), member)
    cluster.wait(PATIENCE, member)
    return [member.heard(), member.owned()]


def _read_again(cluster: Cluster, member: Member) -> list[int]:
    """The reads of a recreated topic, after the client has learned of the new topic, if it ever does."""
    # The pause prevents fetches: whether a fetch would find its offset in the new log is a matter of chance.
    member.pause(0)
    cluster.recreate_topic()
    if cluster.protocol == "848":
        cluster.until(lambda: len(member.heard()) == 3, member)
    else:
        cluster.wait(PATIENCE, member)
    member.resume(0)
    taken: list[int] = []

    def complete() -> bool:
        taken.extend(member.taken())
        return NEW_MESSAGES - 1 in taken

    cluster.until(complete, member)
    return taken


@_scenario(
    differing(
        classic=[list(range(20, NEW_MESSAGES)), ["assign 1"]],
        new=[list(range(NEW_MESSAGES)), ["assign 1", "revoke 1", "assign 1"]],
    )
)
def a_topic_that_is_created_anew_is_read_on_by_classic_members(cluster: Cluster) -> Seen:
    member = _alone(cluster)
    cluster.publish(20)
    _take(cluster, member, 20)
    return [_read_again(cluster, member), member.heard()]


@_scenario(differing(new=[list(range(20, NEW_MESSAGES)), [None]]))
def what_is_committed_in_the_revoke_of_a_topic_that_is_created_anew_counts_there(cluster: Cluster) -> Seen:
    codes: list[str | None] = []
    member = _alone(cluster, on_revoke=lambda member: codes.append(member.commit(20)))
    cluster.publish(20)
    _take(cluster, member, 20)
    taken = _read_again(cluster, member)
    return [taken, codes[:1]]
