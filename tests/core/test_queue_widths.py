"""The runbook of another number of partitions strands no message, and stranded messages are found by name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lanes import PartitionedQueue
from lanes.queues.stranded import (
    TOLD_EVERY,
    QueueFacts,
    Stranded,
    StrandedLog,
    names_beyond,
    stranded_in,
    stranded_text,
)
from lanes.queues.widths import Runbook, grow_steps, refused_removals, shrink_steps, wider_readers

NAMES = PartitionedQueue("q", 8).names
GROUPS = ("billing", "mail")


def queue(partitions: int) -> PartitionedQueue:
    return PartitionedQueue("q", partitions)


def read(size: int = 3, **of: int) -> QueueFacts:
    """A physical queue that these groups read; ``of``: messages that each group has not finished."""
    return QueueFacts(size, sum(of.values()), of, dict.fromkeys(of, 1))


def unread(size: int = 3, **of: int) -> QueueFacts:
    return QueueFacts(size, sum(of.values()), of, dict.fromkeys(of, 0))


def progress(runbook: Runbook) -> list[str]:
    return [step.progress for step in runbook.steps]


# --- names


@pytest.mark.parametrize(
    ("present", "known", "names"),
    [
        (queue(1), (), NAMES[1:2]),
        (queue(2), (), NAMES[2:4]),
        (queue(2), (*NAMES, "q__p", "q__p07", "q__p-7", "q__p٧", "other__p7", "q__p99999"), NAMES[2:]),
        (PartitionedQueue.of("q", ["eu", "us"]), (), NAMES[:4]),
        (PartitionedQueue.of("q", ["q__p1", "q"]), (), NAMES[2:4]),
    ],
)
def test_stranded_messages_are_looked_for_up_to_twice_the_width_and_under_former_names(
    present: PartitionedQueue, known: tuple[str, ...], names: tuple[str, ...]
) -> None:
    assert names_beyond(present, known) == names


def test_a_queue_of_the_highest_width_has_no_computed_names_beyond_its_own() -> None:
    assert names_beyond(queue(32_767)) == ()


# --- stranded messages


def test_messages_that_the_group_does_not_read_are_stranded() -> None:
    facts = {
        "q": unread(billing=5),  # of the queue itself: a rebalance may be under way
        "q__p2": unread(billing=7, mail=1),
        "q__p3": read(billing=9),
        "q__p4": unread(billing=0),
        "q__p5": QueueFacts(),
    }
    assert stranded_in(queue(2), facts, "billing") == (Stranded("q", "q__p2", 7),)


def test_the_warning_about_stranded_messages_names_each_physical_queue_their_number_and_the_remedy() -> None:
    found = [Stranded("q", name, number) for number, name in enumerate(NAMES[2:], 1)]
    assert stranded_text(found, "group 'billing'") == (
        "queue 'q': no consumer of group 'billing' reads the messages in 'q__p2' (1), 'q__p3' (2), 'q__p4' (3), "
        "'q__p5' (4), 'q__p6' (5) and 1 more. The producers use another number of partitions; start the consumers "
        "with that number"
    )


def test_stranded_messages_are_logged_at_once_and_then_every_30_seconds() -> None:
    log, two, three = StrandedLog(), Stranded("q", "q__p2", 1), Stranded("q", "q__p3", 1)
    assert log.due([two], 0.0) == [two]
    assert log.due([two._replace(messages=9), three], 5.0) == [three]
    assert log.due([two, three], TOLD_EVERY) == [two]
    assert log.due([], TOLD_EVERY + 1) == []
    # It was empty meanwhile, so this is a new incident.
    assert log.due([three], TOLD_EVERY + 2) == [three]


# --- grow


def test_a_growing_queue_gets_its_physical_queues_first() -> None:
    runbook = grow_steps(queue(1), queue(4), {"q": read(billing=5)}, ["billing"])
    assert runbook.create == {"q__p1": 3, "q__p2": 3, "q__p3": 3}
    assert progress(runbook) == ["due", "due", "unknown"]
    assert [step.action for step in runbook.steps] == [
        "create the physical queues",
        "start all workers with partitions=4",
        "start all producers with partitions=4",
    ]
    assert runbook.steps[0].found == "missing: 'q__p1', 'q__p2', 'q__p3'"
    assert runbook.faults == ()


def test_a_growing_queue_needs_the_workers_of_each_group_next() -> None:
    facts = {"q": read(billing=0, mail=0), "q__p1": QueueFacts(3, 0, {}, {"billing": 2})}
    runbook = grow_steps(queue(1), queue(2), facts, GROUPS)
    assert progress(runbook) == ["done", "due", "unknown"]
    assert runbook.steps[1].found == "not read: 'q__p1' by group 'mail'"
    facts["q__p1"] = QueueFacts(3, 0, {}, {"billing": 2, "mail": 1})
    assert progress(grow_steps(queue(1), queue(2), facts, GROUPS)) == ["done", "done", "unknown"]


def test_without_a_group_the_start_of_the_workers_stays_unknown() -> None:
    runbook = grow_steps(queue(1), queue(2), {"q": read()}, [])
    assert runbook.steps[1].progress == "unknown"
    assert runbook.steps[1].found == "no group has a position in the queue; name the groups of the workers"


def test_producers_that_grow_before_the_workers_are_a_fault() -> None:
    facts = {"q": read(billing=0), "q__p1": unread(billing=12)}
    assert grow_steps(queue(1), queue(2), facts, ["billing"]).faults == (
        (
            "12 messages wait in 'q__p1', and no consumer of group 'billing' reads them; producers already use more "
            "than 1 partitions, so start the workers with 2 now"
        ),
    )


def test_unequal_and_missing_physical_queues_are_faults() -> None:
    facts = {"q": read(3), "q__p2": read(6)}
    assert grow_steps(queue(2), queue(4), facts, []).faults == (
        "'q__p1' of the present queue does not exist",
        "'q__p2' has 6 partitions at the broker, and 'q' has 3; give both the same number",
    )


def test_workers_that_still_use_the_former_number_must_be_restarted() -> None:
    facts = {"q": read(1, billing=0), "q__p1": QueueFacts(1, 0, {}, {"billing": 1})}
    found = (
        "a number of partitions is stored by group 'billing' (1); stop all its members, and run the command "
        "with --apply"
    )
    grown = grow_steps(queue(1), queue(2), facts, ["billing"], {"billing": 1, "other": 1})
    assert grown.steps[0].found == "all exist"
    assert grown.steps[1][1:] == ("due", found)
    facts["q__p1"] = QueueFacts(1, 0, {"billing": 0}, {"billing": 0})
    shrunk = shrink_steps(queue(2), queue(1), facts, ["billing"], {}, {"billing": 2})
    assert shrunk.steps[2][1:] == ("due", found.replace("(1)", "(2)"))
    assert shrunk.remove == ("q__p1",)
    for stored in ({"billing": 1}, {}):
        assert shrink_steps(queue(2), queue(1), facts, ["billing"], {}, stored).steps[2].progress == "done"


# --- shrink


def shrink(facts: dict[str, QueueFacts], **arrived: int) -> Runbook:
    return shrink_steps(queue(2), queue(1), {"q": read(billing=0)} | facts, ["billing"], arrived)


def test_a_shrinking_queue_waits_for_every_group() -> None:
    facts = {"q__p1": read(billing=3, audit=4)}
    runbook = shrink(facts)
    assert progress(runbook) == ["unknown", "due", "due", "due"]
    assert runbook.steps[1].found == (
        "not finished: 4 messages of 'q__p1' by group 'audit', 3 messages of 'q__p1' by group 'billing'"
    )
    assert (runbook.remove, runbook.faults) == ((), ())
    assert refused_removals(runbook, ["q__p1"], facts) == [
        "group 'audit' has not finished 4 messages of 'q__p1'",
        "group 'billing' has not finished 3 messages of 'q__p1'",
        "group 'audit' still reads 'q__p1'",
        "group 'billing' still reads 'q__p1'",
    ]


def test_workers_that_shrink_before_the_queue_is_empty_are_a_fault() -> None:
    assert shrink({"q__p1": unread(billing=3)}).faults == (
        (
            "group 'billing' has not finished 3 messages of 'q__p1', and none of its consumers reads it; start a "
            "worker with partitions=2 again"
        ),
    )


def test_a_producer_that_still_writes_keeps_the_physical_queue() -> None:
    facts = {"q__p1": unread(billing=0)}
    runbook = shrink(facts, q__p1=2)
    assert progress(runbook) == ["due", "done", "done", "due"]
    assert runbook.steps[0].found == "a producer still writes: 2 messages to 'q__p1'"
    assert refused_removals(runbook, ["q__p1"], facts) == ["messages still arrive in 'q__p1'"]


def test_messages_of_no_group_are_kept() -> None:
    facts = {"q__p1": QueueFacts(3, 7)}
    runbook = shrink(facts)
    assert progress(runbook) == ["unknown", "due", "done", "due"]
    assert refused_removals(runbook, ["q__p1"], facts) == [
        "'q__p1' holds 7 messages, and no group has a position in it"
    ]


def test_a_finished_physical_queue_may_be_removed() -> None:
    facts = {"q__p1": QueueFacts(3, 7, {"billing": 0}, {"billing": 0})}
    runbook = shrink(facts)
    assert progress(runbook) == ["unknown", "done", "done", "due"]
    assert runbook.remove == ("q__p1",)
    assert refused_removals(runbook, ["q__p1"], facts) == []
    assert progress(shrink({})) == ["unknown", "done", "done", "done"]


# --- any facts


def test_workers_with_more_partitions_than_the_command_knows_are_a_fault() -> None:
    facts = {NAMES[1]: read(billing=0), NAMES[4]: read(billing=2), NAMES[5]: read(billing=0), NAMES[6]: unread(mail=1)}
    assert wider_readers(queue(4), facts, GROUPS) == [
        "group 'billing' reads 'q__p4', 'q__p5', so its workers have more than 4 partitions; correct --from or --to"
    ]
    assert wider_readers(queue(7), facts, GROUPS) == []
    assert wider_readers(queue(4), facts, ["mail"]) == []


NUMBERS = st.integers(0, 2)
OF_GROUPS = st.dictionaries(st.sampled_from(GROUPS), NUMBERS)
FACTS = st.dictionaries(
    st.sampled_from(NAMES), st.builds(QueueFacts, st.integers(0, 3), st.integers(0, 5), OF_GROUPS, OF_GROUPS)
)


@given(FACTS, st.integers(1, 4), st.integers(1, 4), st.dictionaries(st.sampled_from(NAMES), NUMBERS))
def test_no_physical_queue_is_removed_while_a_group_needs_it(
    facts: dict[str, QueueFacts], width: int, more: int, arrived: dict[str, int]
) -> None:
    before, after = queue(width + more), queue(width)
    runbook = shrink_steps(before, after, facts, ["billing"], arrived)
    assert set(runbook.remove) <= set(before.names) - set(after.names)
    for name in runbook.remove:
        fact = facts[name]
        assert not any(fact.unfinished.values()) and not any(fact.readers.values()) and not arrived.get(name)
        assert fact.unfinished or not fact.messages
    left = [name for name in before.names[width:] if name in facts and facts[name].size]
    refused = refused_removals(runbook, before.names[width:], facts)
    assert bool(refused) == (set(left) != set(runbook.remove))


@given(FACTS, st.integers(1, 4), st.integers(1, 4))
def test_producers_grow_only_after_each_group_reads_every_physical_queue(
    facts: dict[str, QueueFacts], width: int, more: int
) -> None:
    after = queue(width + more)
    runbook = grow_steps(queue(width), after, facts, GROUPS)
    ready = all(facts.get(name, QueueFacts()).readers.get(group) for name in after.names[width:] for group in GROUPS)
    assert (runbook.steps[1].progress == "done") == ready
    exist = {name: fact.size for name, fact in facts.items() if fact.size and name in after.names}
    agree = exist.keys() >= set(queue(width).names) and len(set(exist.values())) == 1
    assert runbook.create.keys() == (set(after.names[width:]) - exist.keys() if agree else set())
    assert set(runbook.create.values()) <= set(exist.values())


@given(FACTS, st.integers(1, 4))
def test_messages_that_the_workers_do_not_read_after_a_change_are_stranded(
    facts: dict[str, QueueFacts], width: int
) -> None:
    """Without a fault in the runbook of a growth, workers of the smaller width miss no message."""
    before, after = queue(width), queue(2 * width)
    beyond = {name: facts[name] for name in names_beyond(before) if name in facts}
    found = {each.name for each in stranded_in(before, beyond, "mail")}
    existing = {name: fact for name, fact in facts.items() if fact.size}
    faults = grow_steps(before, after, existing, ["mail"]).faults
    assert found == {name for name in after.names if any(f"messages wait in {name!r}," in text for text in faults)}
