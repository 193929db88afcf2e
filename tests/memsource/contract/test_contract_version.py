"""What the contract of a source asks, written down beside its version: neither changes without the other."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Sequence
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Final, cast, get_args

import anyio
import pytest

import lanes.source
import memsource.contract.commits
import memsource.contract.harness
import memsource.contract.room
import memsource.contract.source
from lanes.core.types import Room
from lanes.source import CONTRACT_VERSION, Source, SourceEvent, SourceTraits
from memsource.contract.source import NOT_CHECKED, Ability, Check, ContractBroken, checks
from memsource.memory.source import MemorySource
from tests.memsource.contract.test_memory import EVERYTHING, MemoryHarness

ROOT: Final = Path(__file__).parents[3]

ASKED: Final = {
    1: {
        "methods": {
            "open": (),
            "receive": ("room",),
            "settle": ("settlements",),
            "extend": ("messages",),
            "release": ("partition",),
            "aclose": (),
        },
        "events": ["Assigned", "Delivered", "Exhausted", "Generation", "Lost", "Progressed", "Revoking"],
        "traits without a default": ["name"],
        "checks": [
            "aclose_is_idempotent",
            "aclose_without_open",
            "assigns_before_it_delivers",
            "assigns_with_a_floor",
            "completed_is_handed_over",
            "delivers_everything_in_order",
            "exhausted_is_the_last_event",
            "extend_keeps_messages",
            "goes_on_with_what_is_published_later",
            "large_message_comes_alone",
            "loss_is_told_without_room",
            "messages_can_be_read",
            "no_room_no_messages",
            "nothing_more_after_loss",
            "nothing_more_after_revoking",
            "partitions_commit_at_once",
            "paused_partitions_are_left_out",
            "receive_is_cancel_safe",
            "release_commits_all",
            "release_flushes",
            "release_twice_at_once_is_one",
            "revoke_is_told_without_room",
            "room_is_respected",
            "settle_is_idempotent",
            "settled_stays_settled",
            "start_is_cancel_safe",
            "starts_at_the_committed_floor",
            "the_latest_commit_counts",
            "traits_can_be_kept",
            "unsettled_comes_back",
            "what_is_not_extended_comes_again",
        ],
    }
}
"""By version; an older one is not kept."""


def name_of(check: Check) -> str:
    return check.__name__.removeprefix("check_")


def test_the_version_rises_with_what_is_asked_of_a_source() -> None:
    methods = {
        name: tuple(inspect.signature(method).parameters)[1:]
        for name, method in vars(Source).items()
        if inspect.isfunction(method) and not name.startswith("_")
    }
    asked = {
        "methods": methods,
        "events": sorted(event.__name__ for event in get_args(SourceEvent)),
        "traits without a default": [each.name for each in fields(SourceTraits) if each.default is MISSING],
        "checks": sorted(name_of(check) for check in checks(get_args(Ability))),
    }
    assert asked == ASKED[CONTRACT_VERSION], (
        "The contract has changed. If a source that kept it may not keep it now, raise lanes.source.CONTRACT_VERSION "
        "and say so in docs/guides/writing-a-source.md and CHANGELOG.md. In any case write down here what it asks now."
    )


def test_the_page_and_the_constant_tell_the_same_version() -> None:
    page = (ROOT / "docs" / "guides" / "writing-a-source.md").read_text()
    assert re.findall(r"`lanes\.source\.CONTRACT_VERSION` is (\d+)", page) == [str(CONTRACT_VERSION)]
    assert "CONTRACT_VERSION" in lanes.source.__all__


@pytest.mark.parametrize("can", [["ack_wait"], ["finish", "Revoke"]])
def test_an_ability_that_is_none_is_refused(can: list[str]) -> None:
    with pytest.raises(ValueError, match=rf"'{can[-1]}' in can=.* must be one of 'ack wait', 'revoke'"):
        checks(cast(Sequence[Ability], can))


@pytest.mark.anyio
async def test_a_source_with_a_timer_has_to_be_checked_for_it() -> None:
    (check,) = (check for check in checks(()) if name_of(check) == "traits_can_be_kept")
    harness = MemoryHarness()
    await check(harness)
    harness.can = tuple(each for each in EVERYTHING if each != "ack wait")
    with pytest.raises(ContractBroken, match=r"extend_interval is .* can needs 'ack wait'"):
        await check(harness)


def test_every_trait_is_checked_or_it_is_said_why_not() -> None:
    read = {
        node.attr
        for module in (
            memsource.contract.source,
            memsource.contract.commits,
            memsource.contract.room,
            memsource.contract.harness,
        )
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value).endswith("traits")
    }
    assert sorted([*read, *NOT_CHECKED]) == sorted(each.name for each in fields(SourceTraits))
    assert all(NOT_CHECKED.values())


class SaysOther(MemorySource):
    said: ClassVar[dict[str, Any]] = {}

    async def open(self) -> SourceTraits:
        return replace(await super().open(), **self.said)


class SaysOtherHarness(MemoryHarness):
    def source(self) -> Source:
        self._newest = SaysOther(self.broker)
        return self._newest


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("said", "found"),
    [
        ({"settles": "cumulative"}, "settles is 'cumulative', and can is"),
        ({"partitions": 2}, "3 were assigned, partitions is 2"),
        ({"plans": True}, "plans is True, Generation came 0x"),
        ({"revoke_limit": 0.0}, "revoke_limit is 0.0"),
        ({"system": ""}, "no system"),
    ],
)
async def test_a_trait_that_is_not_so_is_found(
    said: dict[str, Any], found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SaysOther, "said", said)
    (check,) = (check for check in checks(()) if name_of(check) == "traits_can_be_kept")
    with pytest.raises(ContractBroken, match=found):
        await check(SaysOtherHarness(partitions=3))


@pytest.mark.anyio
@pytest.mark.parametrize("kept", [True, False])
async def test_a_revocation_that_gives_more_time_than_the_broker_does_is_found(
    kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SaysOther, "said", {"revoke_limit": 30.0 if kept else 29.0})
    (check,) = (check for check in checks(["revoke"]) if name_of(check) == "revoke_is_told_without_room")
    if kept:
        await check(SaysOtherHarness())
    else:
        with pytest.raises(ContractBroken, match="more time than revoke_limit"):
            await check(SaysOtherHarness())


class KeepsForTheDead(MemoryHarness):
    """What a source left is kept for it until time has passed, and nobody lets it pass."""

    sources = 0

    def source(self) -> lanes.source.Source:
        self.sources += 1
        return super().source() if self.sources == 1 else Silent(self.broker)


class Silent(MemorySource):
    async def receive(self, room: Room) -> Sequence[SourceEvent]:
        await anyio.sleep_forever()
        raise AssertionError


@pytest.mark.anyio
async def test_the_suite_says_what_to_do_where_nothing_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memsource.contract.harness.TIMEOUT", 0.05)
    (check,) = (check for check in checks(()) if name_of(check) == "unsettled_comes_back")
    with pytest.raises(ContractBroken, match=r"no event within .* see Harness\.source"):
        await check(KeepsForTheDead())
