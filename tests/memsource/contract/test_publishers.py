"""A publisher in memory keeps the contract suite of publishers, and the suite finds publishers that break it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Collection, Sequence
from typing import Any

import pytest

from lanes.errors import LanesError, SourceError
from lanes.outputs.publisher import Output, Publisher, Report, output_id
from memsource import MemoryPublisher
from memsource.contract.harness import ContractBroken
from memsource.contract.publishers import PublisherAbility, PublisherCheck, Visible, publisher_checks

ALL: Collection[PublisherAbility] = ("targets", "deduplicates", "outage")

pytestmark = pytest.mark.anyio


class Log:
    """A broker that drops repeated ids, if it has ``deduplicates``."""

    def __init__(self) -> None:
        self.outputs: list[Output] = []
        self.ids: set[str] = set()
        self.down = False


class Named(MemoryPublisher):
    """A publisher of a service, over a log."""

    def __init__(self, log: Log, name: str) -> None:
        super().__init__()
        self.log, self.name = log, name
        self.refused["wrong"] = SourceError("no such target")

    async def publish(self, outputs: Sequence[Output], report: Report) -> None:
        if self.log.down:
            raise SourceError("down", retryable=True)
        await super().publish(outputs, lambda output, error: self.reported(output, error, report))

    def reported(self, output: Output, error: Exception | None, report: Report) -> None:
        if error is None:
            self.write(output)
        report(output, error)

    def write(self, output: Output) -> None:
        if output_id(self.name, output) not in self.log.ids:
            self.log.ids.add(output_id(self.name, output))
            self.log.outputs.append(output)


class MemoryHarness:
    """A log in memory. ``kind``: the class of the publishers."""

    can = ALL
    target = "out"
    wrong_target = "wrong"

    def __init__(self, kind: type[Named] = Named) -> None:
        self.kind, self.log = kind, Log()

    def publisher(self, name: str = "one") -> Publisher:
        return self.kind(self.log, name)

    async def visible(self) -> Sequence[Visible]:
        return [Visible(one.key, one.value, dict((*one.headers, *one.trace))) for one in self.log.outputs]

    @contextlib.asynccontextmanager
    async def outage(self) -> AsyncIterator[None]:
        self.log.down = True
        yield
        self.log.down = False


class Forgets(Named):
    """Reports nothing of an output that it does not know."""

    def reported(self, output: Output, error: Exception | None, report: Report) -> None:
        self.write(output)


class Twice(Named):
    """Reports each output twice."""

    def reported(self, output: Output, error: Exception | None, report: Report) -> None:
        super().reported(output, error, report)
        report(output, error)


class Loses(Named):
    """Confirms an output before it is visible, and drops it."""

    def write(self, output: Output) -> None:
        """Do nothing."""


class Untraced(Named):
    """Drops the trace context."""

    def write(self, output: Output) -> None:
        output.trace = ()
        super().write(output)


class Reverses(Named):
    """Shows the newest output first."""

    def write(self, output: Output) -> None:
        self.log.outputs.insert(0, output)


class Repeats(Named):
    """Does not deduplicate."""

    def write(self, output: Output) -> None:
        self.log.outputs.append(output)


class Anonymous(Named):
    """Uses the same name for all services."""

    def __init__(self, log: Log, name: str) -> None:
        super().__init__(log, "all")


class Traced(Named):
    """Makes the id from the trace context too."""

    def write(self, output: Output) -> None:
        self.name = str(output.trace)
        super().write(output)


class Hopeful(Named):
    """Calls a wrong target a failure that may end."""

    def __init__(self, log: Log, name: str) -> None:
        super().__init__(log, name)
        self.refused["wrong"] = OSError("perhaps later")


class Hopeless(Named):
    """Calls an outage permanent."""

    async def publish(self, outputs: Sequence[Output], report: Report) -> None:
        if self.log.down:
            raise LanesError("down")
        await super().publish(outputs, report)


def name_of(check: PublisherCheck) -> str:
    return check.__name__.removeprefix("check_")


@pytest.mark.parametrize("check", publisher_checks(ALL), ids=name_of)
async def test_a_publisher_in_memory_keeps_the_contract(check: PublisherCheck) -> None:
    await check(MemoryHarness())


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (Forgets, "a_confirmed_output_is_visible_whole"),
        (Twice, "a_confirmed_output_is_visible_whole"),
        (Loses, "a_confirmed_output_is_visible_whole"),
        (Loses, "a_closed_publisher_can_open_again"),
        (Untraced, "a_confirmed_output_is_visible_whole"),
        (Reverses, "calls_keep_their_order"),
        (Repeats, "an_output_again_is_one"),
        (Traced, "an_output_again_is_one"),
        (Anonymous, "services_do_not_collide"),
        (Hopeful, "a_wrong_target_fails_alone"),
        (Hopeless, "an_outage_is_retryable"),
    ],
)
async def test_the_suite_finds_a_publisher_that_breaks_the_contract(kind: Any, name: str) -> None:
    (check,) = [check for check in publisher_checks(ALL) if name_of(check) == name]
    with pytest.raises(ContractBroken):
        await check(MemoryHarness(kind))


async def test_an_unknown_ability_is_refused() -> None:
    with pytest.raises(ValueError, match="'magic' in can="):
        publisher_checks(["magic"])  # type: ignore[list-item]
