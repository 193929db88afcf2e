"""The checks, methods and traits of the source contract change only together with its version."""

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
import memsource.contract.source
from lanes.core.types import Room
from lanes.source import CONTRACT_VERSION, Source, SourceEvent, SourceTraits
from memsource.contract.attempts import ATTEMPTS_CHECKS
from memsource.contract.epochs import EPOCH_CHECKS
from memsource.contract.leases import LEASE_CHECKS
from memsource.contract.source import NOT_CHECKED, Ability, Check, ContractBroken, checks
from memsource.memory.source import MemorySource
from tests.memsource.contract.test_memory_source import EVERYTHING, MemoryHarness

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
        "events": [
            "Assigned",
            "Delivered",
            "Exhausted",
            "Generation",
            "Lost",
            "Progressed",
            "Revoking",
            "RevokingPart",
        ],
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
"""By version; only the newest is kept."""


WITHOUT_A_VERSION: Final = {
    "attempts": [
        "a_new_owner_finds_what_was_kept",
        "every_call_may_be_repeated",
        "attempts_do_not_count_down",
        "a_former_owner_changes_nothing",
        "an_owner_drops_what_a_former_one_kept",
        "many_are_dropped_at_once",
        "calls_run_beside_each_other",
        "any_error_has_a_name",
    ],
    "leases": [
        "a_key_that_was_never_written_is_empty",
        "a_write_is_read_by_every_client",
        "revision_0_creates_once",
        "a_write_expects_its_revision",
        "of_many_at_once_one_wins",
        "a_fence_is_the_revision_of_another_key",
        "a_key_expires",
        "a_renewal_begins_the_time_to_live_anew",
        "entries_are_those_with_the_prefix",
        "a_lost_request_is_unknown",
        "a_lost_reply_is_unknown",
    ],
    "epochs": [
        "nothing_is_found_at_first",
        "a_mark_outlives_every_durable",
        "a_mark_tells_the_longest_lease",
        "what_is_made_is_found_by_every_client",
        "each_tells_the_lease_of_who_made_it",
        "they_rise_by_epoch_and_sub_number",
        "they_are_made_strictly",
        "of_two_at_once_only_a_work_queue_refuses_one",
        "it_delivers_what_it_begins_with",
        "the_floor_is_what_is_acknowledged",
        "what_is_deleted_is_gone",
        "what_is_deleted_answers_nobody",
        "the_next_one_gets_what_is_not_acknowledged",
        "a_lost_request_is_unknown",
        "a_lost_reply_is_unknown",
    ],
}
"""The checks of the other suites, in their order."""


def name_of(check: Check) -> str:
    return check.__name__.removeprefix("check_")


def test_the_source_contract_has_the_checks_of_its_version() -> None:
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
        "The contract has changed. If a source that kept it may break it now, raise lanes.source.CONTRACT_VERSION "
        "and describe the change in docs/guides/writing-a-source.md and CHANGELOG.md. In any case update ASKED."
    )


def test_the_other_suites_have_all_their_checks() -> None:
    suites = {"attempts": ATTEMPTS_CHECKS, "leases": LEASE_CHECKS, "epochs": EPOCH_CHECKS}
    found = {suite: [check.__name__.removeprefix("check_") for check in checks] for suite, checks in suites.items()}
    assert found == WITHOUT_A_VERSION


def test_the_page_and_the_constant_state_the_same_version() -> None:
    page = (ROOT / "docs" / "guides" / "writing-a-source.md").read_text()
    assert re.findall(r"`lanes\.source\.CONTRACT_VERSION` is (\d+)", page) == [str(CONTRACT_VERSION)]
    assert "CONTRACT_VERSION" in lanes.source.__all__


@pytest.mark.parametrize("can", [["ack_wait"], ["finish", "Revoke"]])
def test_an_unknown_ability_is_refused(can: list[str]) -> None:
    with pytest.raises(ValueError, match=rf"'{can[-1]}' in can=.* must be one of 'ack wait', 'revoke'"):
        checks(cast(Sequence[Ability], can))


@pytest.mark.anyio
async def test_a_source_with_an_extend_interval_needs_the_ability_ack_wait() -> None:
    (check,) = (check for check in checks(()) if name_of(check) == "traits_can_be_kept")
    harness = MemoryHarness()
    await check(harness)
    harness.can = tuple(each for each in EVERYTHING if each != "ack wait")
    with pytest.raises(ContractBroken, match=r"extend_interval is .* add 'ack wait' to the can"):
        await check(harness)


def test_every_trait_of_a_source_has_a_check_or_a_reason_why_it_has_none() -> None:
    read = {
        node.attr
        for module in (
            memsource.contract.source,
            memsource.contract.commits,
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
        ({"settles": "cumulative"}, "settles is 'cumulative', can is"),
        ({"partitions": 2}, "3 were assigned, but partitions is 2"),
        ({"plans": True}, "plans is True, 0 Generation delivered"),
        ({"revoke_limit": 0.0}, "revoke_limit is 0.0"),
        ({"system": ""}, "no system"),
    ],
)
async def test_a_wrong_trait_is_found(said: dict[str, Any], found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SaysOther, "said", said)
    (check,) = (check for check in checks(()) if name_of(check) == "traits_can_be_kept")
    with pytest.raises(ContractBroken, match=found):
        await check(SaysOtherHarness(partitions=3))


@pytest.mark.anyio
@pytest.mark.parametrize("kept", [True, False])
async def test_a_revocation_timeout_above_revoke_limit_is_found(kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SaysOther, "said", {"revoke_limit": 30.0 if kept else 29.0})
    (check,) = (check for check in checks(["revoke"]) if name_of(check) == "revoke_is_told_without_room")
    if kept:
        await check(SaysOtherHarness())
    else:
        with pytest.raises(ContractBroken, match="timeout above revoke_limit"):
            await check(SaysOtherHarness())


class ReservesForClosed(MemoryHarness):
    """A broker that reserves the messages of a closed source, in a harness that lets no time pass."""

    sources = 0

    def source(self) -> lanes.source.Source:
        self.sources += 1
        return super().source() if self.sources == 1 else Silent(self.broker)


class Silent(MemorySource):
    async def receive(self, room: Room) -> Sequence[SourceEvent]:
        await anyio.sleep_forever()
        raise AssertionError


@pytest.mark.anyio
async def test_a_check_without_redelivery_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memsource.contract.harness.TIMEOUT", 0.05)
    (check,) = (check for check in checks(()) if name_of(check) == "unsettled_comes_back")
    with pytest.raises(ContractBroken, match=r"no event within .* see Harness\.source"):
        await check(ReservesForClosed())
