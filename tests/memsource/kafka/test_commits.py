"""``KafkaBroker`` checks the member and the metadata of a commit, and nothing else."""

from __future__ import annotations

import pytest

from lanes.core.offset_map import encode
from lanes.dead_letter import DeadLetter
from memsource.kafka.broker import KafkaBroker, KafkaSettings
from memsource.kafka.client import Commit, KafkaFailure
from tests.memsource.kafka.stand import Stand

PROTOCOLS = ("eager", "cooperative", "848")


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_commit_is_accepted_without_a_check_of_owner_direction_and_end_of_the_log(protocol: str) -> None:
    stand = Stand(2, 5, protocol=protocol)
    one, two = stand.client("one"), stand.client("two")
    stand.to(1.0)
    stand.poll(one)
    for client, offset in ((one, 4), (two, 1), (one, 10**9), (two, 0)):
        assert stand.commit(client, offset) is None
        assert stand.broker.committed(0) == Commit(offset)
    assert stand.broker.committed(1) is None


def test_a_commit_of_a_former_or_unknown_member_is_refused() -> None:
    stand = Stand(1, 5)
    one = stand.client("one")
    stand.commit(one, 2)
    stand.broker.begin_close(one, stand.now)
    assert stand.commit(one, 3) is None
    stand.broker.end_close(one, stand.now)
    assert stand.commit(one, 4) == "UNKNOWN_MEMBER_ID"
    assert stand.broker.committed(0) == Commit(3)


def test_metadata_is_limited_in_utf_16_units_with_the_nul_of_the_client() -> None:
    stand = Stand(1, 5)
    one = stand.client("one")
    astral = "\U0001f600"
    for fits, too_large in (("x" * 4095, "x" * 4096), ("漢" * 4095, "漢" * 4096), (astral * 2047, astral * 2048)):
        assert stand.commit(one, 1, fits) is None
        assert stand.commit(one, 2, too_large) == "OFFSET_METADATA_TOO_LARGE"
        # The refused commit leaves the old value.
        assert stand.broker.committed(0) == Commit(1, fits)


def test_an_invalid_commit_is_not_sent() -> None:
    stand = Stand(2, 5)
    one = stand.client("one")
    for commit, error in (
        (Commit(1, b"bytes"), TypeError),  # type: ignore[arg-type]
        (Commit(1, "a\0b"), ValueError),
        (Commit(1, "\ud800"), UnicodeEncodeError),
        (Commit(-5), ValueError),
    ):
        with pytest.raises(error):
            stand.broker.commit(one, {0: Commit(3), 1: commit}, stand.now)
    assert stand.broker.committed(0) is None


def test_a_commit_with_one_refused_partition_fails_but_commits_the_others() -> None:
    stand = Stand(3, 5)
    one = stand.client("one")
    commits = {0: Commit(1), 1: Commit(2, "x" * 4096), 2: Commit(3)}
    with pytest.raises(
        KafkaFailure, match=r"OFFSET_METADATA_TOO_LARGE: partition 1 of T: the metadata has 4097 UTF-16 units"
    ) as caught:
        stand.broker.commit(one, commits, stand.now)
    assert caught.value.code == "OFFSET_METADATA_TOO_LARGE"
    assert [stand.broker.committed(number) for number in range(3)] == [Commit(1), None, Commit(3)]


def test_completed_positions_are_finished_and_foreign_metadata_is_ignored() -> None:
    stand = Stand(1, 10)
    one = stand.client("one")
    stand.commit(one, 3, encode(3, [(4, 6), (9, 10)]))
    assert [record.position for record in stand.broker.unfinished] == [3, 6, 7, 8]
    stand.commit(one, 3, "somebody else's")
    assert [record.position for record in stand.broker.unfinished] == [3, 4, 5, 6, 7, 8, 9]
    assert len(stand.broker.records) == 10


def test_a_dead_letter_is_kept_once() -> None:
    letter = DeadLetter(
        id="1", source="T", partition=0, position=0, subject="T", key=None, value=b"", headers=(), attempts=1,
        error_type="E", error_text="", epoch=1, time=0.0,
    )  # fmt: skip
    broker = KafkaBroker()
    broker.write_dead_letter(letter)
    broker.write_dead_letter(letter)
    assert broker.dead_letters == [letter]
    assert not broker.redeliver(0, 0.0)


@pytest.mark.parametrize(
    ("setting", "value"),
    [("session_timeout", 0.0), ("max_poll_interval", float("inf")), ("heartbeat_interval", 6.0), ("prefetch", -1)],
)
def test_invalid_settings_are_refused(setting: str, value: float) -> None:
    with pytest.raises(ValueError, match=setting):
        KafkaSettings(**{setting: value})  # type: ignore[arg-type]


def test_an_unknown_member_is_named() -> None:
    stand = Stand()
    stand.client("one")
    with pytest.raises(LookupError, match="member 'two' has no source of T: make its source, or use one of: 'one'"):
        stand.broker.crash("two", 0.0)
    assert repr(stand.broker) == "<KafkaBroker T: 1 partitions, cooperative, 1 members>"
