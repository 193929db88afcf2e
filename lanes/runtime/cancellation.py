"""The cancellation of a run after a drain, and calls that a cancellation does not interrupt."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import anyio

from lanes.runtime.run import Run

log = logging.getLogger("lanes")


async def to_its_end(call: Callable[[], Awaitable[object]]) -> None:
    """Await a call that no cancellation of the caller interrupts.

    A ``Task.cancel`` takes effect after the call. On asyncio, a shield does not stop ``Task.cancel``, so the call runs
    in another task.

    Args:
        call: Async function without arguments.
    """
    failure: BaseException | None = None

    async def perform() -> None:
        nonlocal failure
        try:
            with anyio.CancelScope(shield=True):
                await call()
        except BaseException as error:
            # The task group would wrap the exception.
            failure = error

    with anyio.CancelScope(shield=True):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(perform)
    if failure is not None:
        raise failure


async def stop_on_second_cancel(
    ended: anyio.Event, stop_at_once: Callable[[], None], cancels: int
) -> BaseException | None:
    """Wait for the end of a drain.

    When the second ``Task.cancel`` of asyncio reaches the caller, end the drain at once. Cancelled scopes have no
    effect. Any other exception, such as ``KeyboardInterrupt``, also ends the drain at once.

    Args:
        ended: Event that is set at the end of the drain.
        stop_at_once: Function that ends the drain. The call does not block.
        cancels: Number of cancellations that have reached the caller.

    Returns:
        The exception other than a cancellation; None = no such exception reached the caller.
    """
    interruption: BaseException | None = None
    while not ended.is_set():
        try:
            with anyio.CancelScope(shield=True):
                await ended.wait()
        except anyio.get_cancelled_exc_class():
            cancels += 1
            if cancels > 1:
                stop_at_once()
        except BaseException as error:
            interruption = error
            stop_at_once()
    return interruption


async def drain_on_cancel(run: Run, within: float) -> None:
    """Wait until the run ends.

    A cancellation drains the run, and takes effect after the drain. The run belongs to a task with a shield. A
    cancelled scope therefore reaches only the caller, who waits for that task. On asyncio, a shield does not stop
    ``Task.cancel``, so a second call ends the drain.

    Args:
        run: The run.
        within: Maximum number of seconds of the drain.
    """
    begun = False
    ended = anyio.Event()
    failure: BaseException | None = None
    interruption: BaseException | None = None

    async def consume() -> None:
        nonlocal begun, failure
        begun = True
        try:
            with anyio.CancelScope(shield=True):
                await run.run()
        except BaseException as error:
            # The task group would wrap the exception.
            failure = error
        finally:
            ended.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(consume)
        try:
            await ended.wait()
        except anyio.get_cancelled_exc_class():
            if begun:
                await _drain(run, ended, within)
            else:
                # Nothing is in flight. The end of ``asyncio.run`` also cancels the new task, which then never begins.
                run.stop_at_once()
            raise
        except BaseException as error:
            # For example KeyboardInterrupt. The shield would let the task group wait for the whole run.
            interruption = error
            run.stop_at_once()
    if interruption is not None:
        raise interruption
    if failure is not None:
        raise failure


async def _drain(run: Run, ended: anyio.Event, within: float) -> None:
    """Drain a run. The caller's task group waits for the end of the run, even after a stop without a drain."""
    if ended.is_set() or run.at_once:
        return
    log.info("%s: the run is cancelled; it drains for at most %g s", run.name, within)
    run.stop()
    why = f"the drain took longer than {within:g} s"
    try:
        with anyio.move_on_after(within, shield=True):
            await ended.wait()
    except anyio.get_cancelled_exc_class():
        why = "the task was cancelled again"
    if not (ended.is_set() or run.at_once):
        log.warning(
            "%s: the run stops at once, because %s; the source delivers unsettled messages again", run.name, why
        )
        run.stop_at_once()
