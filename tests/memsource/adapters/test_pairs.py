"""A run counts each ordered pair of faults, and names the pairs that no run has reached."""

from __future__ import annotations

from memsource.adapters.pairs import WITHIN, Impossible, Pair, Pairs, pairs_of, unreached


def test_each_fault_makes_a_pair_with_every_recent_fault() -> None:
    pairs = Pairs()
    pairs.note(0.0, "crash", "steady")
    pairs.note(1.0, "delay", "commit")
    pairs.note(WITHIN + 0.5, "delay", "drain")
    assert pairs.counts == {Pair("crash", "delay", "commit"): 1, Pair("delay", "delay", "drain"): 1}


def test_unreached_pairs_are_all_others_of_the_broker() -> None:
    reached = {Pair("crash", "freeze", "drain")}
    assert unreached(reached, {"freeze", "crash"}, ("drain",)) == [
        Pair("freeze", "freeze", "drain"),
        Pair("freeze", "crash", "drain"),
        Pair("crash", "crash", "drain"),
    ]
    assert str(Pair("crash", "freeze", "drain")) == "crash>freeze@drain"


def test_impossible_pairs_count_neither_as_possible_nor_as_unreached() -> None:
    impossible: Impossible = {("delay", "close"): "a closed client sends no request"}
    found = pairs_of({"delay", "crash"}, ("close", "drain"), impossible)
    assert [str(pair) for pair in found if pair.phase == "close"] == ["delay>crash@close", "crash>crash@close"]
    assert len(found) == 6
    assert unreached(found, {"delay", "crash"}, ("close", "drain"), impossible) == []
