"""The contract suite of ``lanes.outputs.publisher.Publisher``.

The author of a backend writes a ``PublisherHarness`` and runs every check of ``publisher_checks(harness.can)``, each
with a new harness, under any test runner. A failed check raises ``ContractBroken``.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from typing import Final, Literal, NamedTuple, Protocol, get_args

import anyio

from lanes.core.types import PartitionId
from lanes.errors import is_retryable
from lanes.outputs.publisher import Output, Publisher
from memsource.contract.harness import ContractBroken, checks_within, expect

__all__ = ["PublisherAbility", "PublisherCheck", "PublisherHarness", "Visible", "publisher_checks"]

PublisherAbility = Literal["targets", "deduplicates", "outage"]
"""An ability of a backend or its harness.

- ``targets``: The backend refuses some targets for good.
- ``deduplicates``: The broker drops an output that is sent again.
- ``outage``: The harness can stop the broker for a time.
"""

TIMEOUT: Final = 30.0
"""Seconds within which a broker must confirm an output."""


class Visible(NamedTuple):
    """An output as a reader sees it.

    Attributes:
        key: The key; None = no key.
        value: The payload.
        headers: The headers of the handler and of the trace context, in any order.
    """

    key: bytes | None
    value: bytes | None
    headers: dict[str, bytes]


class PublisherHarness(Protocol):
    """An empty target for outputs. Each check needs a new harness, and closes every publisher of the harness."""

    @property
    def can(self) -> Collection[PublisherAbility]:
        """The abilities of the backend. The suite omits a check that needs any other ability."""

    @property
    def target(self) -> str:
        """An existing target without outputs."""

    def publisher(self, name: str = "one") -> Publisher:
        """Return an unopened publisher of a service.

        Args:
            name: Name of the service, for a backend that deduplicates.

        Returns:
            The publisher.
        """

    async def visible(self) -> Sequence[Visible]:
        """Return all outputs of the target as a reader sees them, in their order."""

    # --- with "targets"

    @property
    def wrong_target(self) -> str:
        """A target that the backend refuses for good."""

    # --- with "outage"

    def outage(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Stop the broker during the block."""


PublisherCheck = Callable[[PublisherHarness], Awaitable[None]]

_CHECKS: Final[list[tuple[PublisherCheck, tuple[PublisherAbility, ...]]]] = []


def publisher_checks(can: Collection[PublisherAbility]) -> list[PublisherCheck]:
    """Return the checks for a backend with some abilities, in order.

    Args:
        can: The abilities, as in ``PublisherHarness.can``.

    Returns:
        The checks whose needed abilities are all in ``can``.

    Raises:
        ValueError: A name in ``can`` is not an ability.
    """
    return checks_within(_CHECKS, can, get_args(PublisherAbility))


def _check(*needs: PublisherAbility) -> Callable[[PublisherCheck], PublisherCheck]:
    def register(check: PublisherCheck) -> PublisherCheck:
        _CHECKS.append((check, needs))
        return check

    return register


def output_to(target: str, position: int, *, number: int = 1, value: bytes | None = None) -> Output:
    """Return an output of the message at a position, with a key, a header and a trace context."""
    return Output(
        target=target,
        value=b"value %d" % position if value is None else value,
        key=b"key",
        headers=(("kind", b"invoice"),),
        trace=(("traceparent", b"00-1-2-01"),),
        number=number,
        source=PartitionId("orders", 3),
        incarnation="first",
        position=position,
        attempt=1,
        message_key=b"lane",
    )


@contextlib.asynccontextmanager
async def _opened(publisher: Publisher) -> AsyncIterator[Publisher]:
    await publisher.open()
    try:
        yield publisher
    finally:
        await publisher.aclose()


async def _published(publisher: Publisher, *outputs: Output) -> dict[Output, Exception | None]:
    """Publish outputs in one call, and return the report of each. Expect exactly one report of each."""
    reports: dict[Output, Exception | None] = {}

    def report(output: Output, error: Exception | None) -> None:
        expect(output in outputs, f"{output!r} was reported, but never passed to publish()")
        expect(output not in reports, f"{output!r} was reported twice")
        reports[output] = error

    with anyio.fail_after(TIMEOUT):
        await publisher.publish(outputs, report)
    expect(len(reports) == len(outputs), f"{len(reports)} of {len(outputs)} outputs were reported when publish() ended")
    return reports


async def _confirmed(publisher: Publisher, *outputs: Output) -> None:
    for output, error in (await _published(publisher, *outputs)).items():
        if error is not None:
            raise ContractBroken(f"{output!r} must be confirmed, but failed: {error!r}") from error


@_check()
async def check_a_confirmed_output_is_visible_whole(harness: PublisherHarness) -> None:
    """When an output is reported without an error, readers see its key, value and headers."""
    async with _opened(harness.publisher()) as publisher:
        await _confirmed(publisher, output_to(harness.target, 1), output_to(harness.target, 2, value=b""))
        found = sorted(await harness.visible(), key=lambda one: one.value or b"")
    headers = {"kind": b"invoice", "traceparent": b"00-1-2-01"}
    expected = [Visible(b"key", b"", headers), Visible(b"key", b"value 1", headers)]
    expect(found == expected, f"visible is {found}, but must be {expected}")


@_check()
async def check_calls_keep_their_order(harness: PublisherHarness) -> None:
    """An output whose call begins after the report of another output of its key is visible after it."""
    async with _opened(harness.publisher()) as publisher:
        for position in range(10):
            await _confirmed(publisher, output_to(harness.target, position))
        found = [one.value for one in await harness.visible()]
    expected = [b"value %d" % position for position in range(10)]
    expect(found == expected, f"visible is {found}, but must be {expected}")


@_check()
async def check_calls_may_overlap(harness: PublisherHarness) -> None:
    """Concurrent calls with many outputs report and show each of them."""
    async with _opened(harness.publisher()) as publisher:
        async with anyio.create_task_group() as tasks:
            for begin in range(0, 200, 20):
                outputs = [output_to(harness.target, position) for position in range(begin, begin + 20)]
                tasks.start_soon(_confirmed, publisher, *outputs)
        found = {one.value for one in await harness.visible()}
    expect(found == {b"value %d" % position for position in range(200)}, f"{len(found)} of 200 outputs are visible")


@_check("deduplicates")
async def check_an_output_again_is_one(harness: PublisherHarness) -> None:
    """An output that is sent again, also with another trace context, is visible once; a changed output is another."""
    async with _opened(harness.publisher()) as publisher:
        await _confirmed(publisher, output_to(harness.target, 1))
        again = output_to(harness.target, 1)
        again.trace, again.attempt = (("traceparent", b"00-9-9-01"),), 2
        await _confirmed(publisher, again)
        expect(len(await harness.visible()) == 1, f"visible is {await harness.visible()}, but must be one output")
        await _confirmed(publisher, output_to(harness.target, 1, value=b"changed"))
        await _confirmed(publisher, output_to(harness.target, 1, number=2))
        await _confirmed(publisher, output_to(harness.target, 2, value=b"value 1"))
    found = sorted(one.value or b"" for one in await harness.visible())
    expect(found == [b"changed", b"value 1", b"value 1", b"value 1"], f"visible is {found}, but must be four outputs")


@_check("deduplicates")
async def check_services_do_not_collide(harness: PublisherHarness) -> None:
    """The same output of two services is visible twice."""
    for name in ("one", "two"):
        async with _opened(harness.publisher(name)) as publisher:
            await _confirmed(publisher, output_to(harness.target, 1))
    expect(len(await harness.visible()) == 2, f"visible is {await harness.visible()}, but must be two outputs")


@_check("targets")
async def check_a_wrong_target_fails_alone(harness: PublisherHarness) -> None:
    """An output to a wrong target fails for good, and does not affect the other outputs of its call."""
    good, wrong = output_to(harness.target, 1), output_to(harness.wrong_target, 2)
    async with _opened(harness.publisher()) as publisher:
        reports = await _published(publisher, wrong, good)
    expect(reports[good] is None, f"{good!r} must be confirmed, but failed: {reports[good]!r}")
    error = reports[wrong]
    permanent = error is not None and not is_retryable(error, unknown=True)
    expect(permanent, f"{wrong!r} must fail with an error of lanes that is not retryable, not {error!r}")


@_check("outage")
async def check_an_outage_is_retryable(harness: PublisherHarness) -> None:
    """During an outage an output fails with a retryable error, and is confirmed when it is sent again afterwards."""
    async with _opened(harness.publisher()) as publisher:
        await _sent_until_confirmed(publisher, output_to(harness.target, 1))
        one = output_to(harness.target, 2)
        async with harness.outage():
            error = await _error_of(publisher, one)
            expect(error is not None, f"{one!r} was confirmed by a broker that is down")
            expect(is_retryable(error, unknown=True), f"an outage must be retryable, not {error!r}")  # type: ignore[arg-type]
        await _sent_until_confirmed(publisher, one)
        found = {visible.value for visible in await harness.visible()}
    expect(b"value 2" in found, f"visible is {found}, but must contain the output that was sent again")


async def _sent_until_confirmed(publisher: Publisher, output: Output) -> None:
    """Send an output as a consumer does, again after each failure. The first write to a new broker may take long."""
    with anyio.fail_after(TIMEOUT):
        error = await _error_of(publisher, output)
        while error is not None:
            await anyio.sleep(0.05)
            error = await _error_of(publisher, output)


async def _error_of(publisher: Publisher, output: Output) -> Exception | None:
    """Send an output, and return its error, also the error of a failed call."""
    try:
        return (await _published(publisher, output))[output]
    except ContractBroken:
        raise
    except Exception as error:
        return error


@_check()
async def check_a_closed_publisher_can_open_again(harness: PublisherHarness) -> None:
    """``aclose`` is idempotent, and a publisher works again after ``open``."""
    publisher = harness.publisher()
    await publisher.aclose()
    for position in (1, 2):
        await publisher.open()
        await _confirmed(publisher, output_to(harness.target, position))
        await publisher.aclose()
        await publisher.aclose()
    expect(len(await harness.visible()) == 2, f"visible is {await harness.visible()}, but must be two outputs")
