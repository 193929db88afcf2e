"""Settings: frozen, keyword-only, validated by their constructors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Literal, get_args

from lanes.arguments import check_one_of, check_positive, check_seconds, check_whole, names_unknown_options, shown_value
from lanes.core.policy import Keyless, Order, Poison
from lanes.errors import ConfigError

__all__ = [
    "RELEASE_WITHIN",
    "SETTLE_WITHIN",
    "Keyless",
    "OnCancel",
    "Order",
    "Poison",
    "Retry",
    "Settings",
    "SyncHandlers",
]

DEFAULT_MAX_IN_FLIGHT: Final = 2_000

SyncHandlers = Literal["threads", "inline", "processes"]

OnCancel = Literal["drain", "stop"]

LANES_LIMIT: Final = 1 << 32
COMMIT_COUNT_LIMIT: Final = 5_000
"""Maximum of ``Settings.commit_count``."""

SETTLE_WITHIN: Final = 5.0
"""Seconds for the last settlement of a drained partition, or the unused part of ``drain_timeout`` if that is longer."""

RELEASE_WITHIN: Final = 10.0
"""Seconds for the release of a drained partition, or the remaining time of the lease if that is longer."""


_OF_NAK: Final = {
    each: f"a handler asks for another attempt by raise lanes.Nak({each}=…)" for each in ("delay", "reason")
}
_IN_A_HANDLER: Final = "A handler asks for another attempt by raise lanes.Nak(reason)"


@names_unknown_options("Retry", homes=_OF_NAK, unnamed=_IN_A_HANDLER)
@dataclass(frozen=True, kw_only=True)
class Retry:
    """The retries of a message: exponential backoff with full jitter, and then the poison policy.

    Attributes:
        attempts: Maximum number of attempts of a message, 1 or more. 1 = no retry.
        backoff: Maximum number of seconds before the second attempt, 0 or more. The maximum doubles with every attempt,
            up to ``max_backoff``.
        max_backoff: Bound of the backoff in seconds, at least ``backoff``.

    Raises:
        ConfigError: A value is out of its range.
    """

    attempts: int = 5
    backoff: float = 0.2
    max_backoff: float = 30.0

    def __post_init__(self) -> None:
        check_whole("Retry.attempts", self.attempts, 1)
        check_seconds("Retry.backoff", self.backoff, 0.0)
        check_seconds("Retry.max_backoff", self.max_backoff, 0.0)
        if self.max_backoff < self.backoff:
            raise ConfigError(
                f"Retry.max_backoff={self.max_backoff} is below Retry.backoff={self.backoff}: "
                "raise max_backoff or lower backoff"
            )


@names_unknown_options("Settings")
@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a consumer.

    Attributes:
        concurrency: Maximum number of handlers that run at once, 1 or more.
        max_in_flight: Maximum number of messages that are delivered and not yet settled, at least ``concurrency``.
            ``None`` = 2,000 or ``concurrency``, whichever is higher, but at most the limit of the broker's consumer.
        max_in_flight_bytes: Maximum size of the messages in flight, in bytes, 1 or more. The last received batch may
            exceed the bound.
        concurrency_per_partition: Maximum number of handlers of one partition that run at once, 1 … ``concurrency``.
            With ``batch``, the bound counts calls. ``None`` = no bound for one partition.
        max_in_flight_per_partition: Maximum number of messages of one partition that are delivered and not yet settled,
            at least ``concurrency_per_partition`` and at most ``max_in_flight``. ``None`` = no bound for one partition.
            With this setting or ``concurrency_per_partition``, the partitions take turns to start messages. All
            partitions of a physical queue of a ``PartitionedQueue`` share both bounds, as if these partitions were one
            partition.
        max_ahead: Maximum number of messages of a partition that may run above the committed position, 1 or more. After
            a crash, at most this number of messages of each partition run again. The bound applies only to sources that
            commit positions.
        order: ``"key"`` = in order within a key. ``"partition"`` = in order within a partition. ``"serial"`` = one
            message at a time, from a source of one partition. ``"none"`` = no order.
        keyless: Order of messages without a key. ``"any"`` = none. ``"one_lane"`` = in order within their partition.
        lanes: Number of lanes of a partition, 1 … 2³²; keys that share a lane run one at a time. ``None`` = a lane for
            every key.
        batch: Maximum number of messages that the handler receives as one list, 1 or more. ``None`` = one message
            a call.
        linger: Maximum number of seconds that a batch waits for more messages, 0 or more. Requires ``batch``.
        timeout: Seconds that a handler may take, above 0. The consumer cancels a handler that takes longer, and the
            attempt fails. A handler in a thread cannot be cancelled. A handler that exceeds its timeout in a thread
            occupies its lane and its thread until the handler returns. The log reports this handler. With processes,
            the consumer kills the process of the handler. ``None`` = no limit.
        sync_handlers: Executor of a plain handler. ``"threads"`` = threads, at most ``concurrency``. ``"inline"`` = the
            event loop, which the handler blocks. ``"processes"`` = ``processes`` long-lived processes, for handlers
            that use the CPU.
        processes: Number of processes, 1 … ``concurrency``, and maximum number of handlers that run at once. The
            setting is valid only with ``sync_handlers="processes"``, and required there.
        process_setup: Importable plain function without arguments, which each process calls before its first message.
            The setting requires ``sync_handlers="processes"``. ``None`` = no function.
        retry: Attempts and backoff; see ``Retry``.
        poison: Policy for a message that gets no further attempt. ``"skip"`` = write its dead letter, then continue.
            ``"block"`` = stop its key until a call of ``Consumer.unblock`` or ``park``. ``"block_and_dlq"`` = write its
            dead letter and stop its key. ``"exit"`` = drain, and stop the consumer with ``HandlerHalted``. ``None`` =
            ``"skip"`` if the consumer has dead letters and the order is not ``"serial"``, else ``"exit"``.
        commit_interval: Maximum number of seconds until the commit of a finished message is due, 0 or more. While
            commits take little CPU, a commit is due after a twentieth of this time. A commit is due at once when 5,000
            finished messages wait for it, or a quarter of ``max_ahead`` if that is fewer. A commit is also due at once
            when the partition has reached ``max_ahead`` and the committed position can rise. In a cohort, the same
            interval and share apply to the writes that store messages which finished above an unfinished message.
        max_outputs: Maximum number of outputs that one attempt of a message publishes, 1 or more. A further output
            fails the attempt. Requires a publisher.
        max_output_bytes: Maximum sum of the sizes of these outputs, in bytes, 1 or more. The consumer starts no handler
            while the unconfirmed outputs of all messages have reached ``max_in_flight_bytes``.
        unhealthy_after: Seconds, above 0, after which a lasting fault makes the consumer unhealthy. Such a fault is a
            message, a start or a request to the attempt store that does not finish. A settlement that keeps failing,
            and waiting messages that the broker does not deliver, are faults too. Without an answer of the broker, the
            consumer is unhealthy after 30 s at the latest.
        drain_timeout: Seconds for running handlers to finish after a revocation of their partition or a stop of the
            consumer, 0 or more. ``longest_drain`` also includes ``grace``, the last settlement and the release.
        grace: Seconds for handlers to end after their cancellation at ``drain_timeout``, 0 or more.
        on_cancel: Action of the consumer after a cancellation of ``Consumer.run``. ``"drain"`` = drain for at most
            ``longest_drain`` seconds, as after ``Consumer.stop``. ``"stop"`` = cancel the handlers at once.

    Raises:
        ConfigError: A value is out of its range, or two settings contradict each other.
    """

    concurrency: int = 100
    max_in_flight: int | None = None
    max_in_flight_bytes: int = 64 * 1024 * 1024
    concurrency_per_partition: int | None = None
    max_in_flight_per_partition: int | None = None
    max_ahead: int = 10_000
    order: Order = "key"
    keyless: Keyless = "any"
    lanes: int | None = None
    batch: int | None = None
    linger: float = 0.0
    timeout: float | None = None
    sync_handlers: SyncHandlers = "threads"
    processes: int | None = None
    process_setup: Callable[[], object] | None = None
    retry: Retry = field(default_factory=Retry)
    poison: Poison | None = None
    commit_interval: float = 1.0
    max_outputs: int = 1_000
    max_output_bytes: int = 16 * 1024 * 1024
    unhealthy_after: float = 300.0
    drain_timeout: float = 30.0
    grace: float = 2.0
    on_cancel: OnCancel = "drain"

    def __post_init__(self) -> None:
        for name in ("concurrency", "max_in_flight_bytes", "max_ahead", "max_outputs", "max_output_bytes"):
            check_whole(name, getattr(self, name), 1)
        for name in ("linger", "commit_interval", "drain_timeout", "grace"):
            check_seconds(name, getattr(self, name), 0.0)
        if not isinstance(self.retry, Retry):
            raise ConfigError(
                f"retry={shown_value(self.retry)} is not a lanes.Retry: write retry=lanes.Retry(attempts=…)"
            )
        check_positive("unhealthy_after", self.unhealthy_after)
        check_one_of("order", self.order, get_args(Order))
        check_one_of("keyless", self.keyless, get_args(Keyless))
        check_one_of("sync_handlers", self.sync_handlers, get_args(SyncHandlers))
        check_one_of("on_cancel", self.on_cancel, get_args(OnCancel))
        check_one_of("poison", self.poison, (*get_args(Poison), None))
        if self.timeout is not None:
            check_positive("timeout", self.timeout)
        if self.max_in_flight is not None:
            self._check_max_in_flight(self.max_in_flight)
        self._check_budgets()
        self._check_lanes()
        self._check_batch()
        self._check_processes()
        if self.order == "serial" and self.poison == "skip":
            raise ConfigError(
                'order="serial" with poison="skip": serial order must not replace a message by a dead letter; use '
                'poison="block_and_dlq", "block" or "exit", or order="partition"'
            )

    def _check_max_in_flight(self, max_in_flight: int) -> None:
        check_whole("max_in_flight", max_in_flight, 1)
        if max_in_flight < self.concurrency:
            raise ConfigError(
                f"max_in_flight={max_in_flight} is below concurrency={self.concurrency}: a handler needs a "
                "message in flight; raise max_in_flight or lower concurrency"
            )

    def _check_budgets(self) -> None:
        calls, messages = self.concurrency_per_partition, self.max_in_flight_per_partition
        if calls is not None:
            check_whole("concurrency_per_partition", calls, 1)
            if calls > self.concurrency:
                raise ConfigError(
                    f"concurrency_per_partition={calls} is above concurrency={self.concurrency}: a partition could "
                    "never run so many handlers; lower concurrency_per_partition or raise concurrency"
                )
        if messages is None:
            return
        check_whole("max_in_flight_per_partition", messages, 1)
        if calls is not None and messages < calls:
            raise ConfigError(
                f"max_in_flight_per_partition={messages} is below concurrency_per_partition={calls}: a handler needs a "
                "message in flight; raise max_in_flight_per_partition or lower concurrency_per_partition"
            )
        self._check_budget_against(self.max_in_flight or max(DEFAULT_MAX_IN_FLIGHT, self.concurrency))

    def _check_budget_against(self, max_in_flight: int) -> None:
        messages = self.max_in_flight_per_partition
        if messages is not None and messages > max_in_flight:
            raise ConfigError(
                f"max_in_flight_per_partition={messages} is above max_in_flight={max_in_flight}: a partition could "
                "never have so many messages in flight; lower max_in_flight_per_partition or raise max_in_flight"
            )

    def _check_lanes(self) -> None:
        if self.lanes is None:
            return
        check_whole("lanes", self.lanes, 1)
        if self.lanes > LANES_LIMIT:
            raise ConfigError(f"lanes={self.lanes}: must be at most {LANES_LIMIT}; leave it out for a lane per key")
        if self.order != "key":
            raise ConfigError(
                f'lanes={self.lanes} with order="{self.order}": only order="key" has lanes by key; leave out lanes or '
                "order"
            )

    def _check_batch(self) -> None:
        if self.batch is None:
            if self.linger:
                raise ConfigError(f"linger={self.linger:g} without batch: set batch=…, or leave linger out")
            return
        check_whole("batch", self.batch, 1)
        if self.max_in_flight is not None:
            self._check_batch_against(self.max_in_flight)

    def _check_batch_against(self, max_in_flight: int) -> None:
        if self.batch is not None and self.batch > max_in_flight:
            raise ConfigError(
                f"batch={self.batch} is above max_in_flight={max_in_flight}: a batch could never be "
                "full; raise max_in_flight or lower batch"
            )

    def check_publisher(self) -> None:
        """Raise ``ConfigError`` if handlers with these settings cannot publish."""
        if self.sync_handlers == "processes":
            raise ConfigError(
                'publisher=… with sync_handlers="processes": the outputs of a handler stay in its process; use '
                'sync_handlers="threads", or leave publisher out'
            )

    def _check_processes(self) -> None:
        if self.sync_handlers != "processes":
            for name in ("processes", "process_setup"):
                if getattr(self, name) is not None:
                    raise ConfigError(
                        f'{name}={shown_value(getattr(self, name))} with sync_handlers="{self.sync_handlers}": set '
                        f'sync_handlers="processes", or leave {name} out'
                    )
            return
        if self.processes is None:
            raise ConfigError(
                'sync_handlers="processes" without processes: set processes=…, at most the number of CPUs that this '
                "program may use"
            )
        check_whole("processes", self.processes, 1)
        if self.processes > self.concurrency:
            raise ConfigError(
                f"processes={self.processes} is above concurrency={self.concurrency}: so many handlers could never run "
                "at once; lower processes or raise concurrency"
            )
        if self.process_setup is not None and not callable(self.process_setup):
            raise ConfigError(f"process_setup={shown_value(self.process_setup)}: must be a function without arguments")

    @property
    def running_limit(self) -> int:
        """Maximum number of handlers that run at once: ``processes`` with processes, else ``concurrency``."""
        return self.concurrency if self.processes is None else self.processes

    @property
    def commit_count(self) -> int:
        """Number of finished messages of a partition at which a commit starts before ``commit_interval`` has passed."""
        return max(1, min(COMMIT_COUNT_LIMIT, self.max_ahead // 4))

    def poison_policy(self, *, has_dead_letters: bool) -> Poison:
        """Return the effective poison policy.

        Args:
            has_dead_letters: Whether the consumer has a target for dead letters.

        Returns:
            ``poison``, or its default.

        Raises:
            ConfigError: The policy needs dead letters, and the consumer has no target for dead letters.
        """
        if self.poison in ("skip", "block_and_dlq") and not has_dead_letters:
            raise ConfigError(
                f'poison="{self.poison}" needs dead letters, or messages are lost: pass dead_letters=… or use '
                'poison="exit"'
            )
        if self.poison is None and self.order == "serial":
            return "exit"
        return self.poison or ("skip" if has_dead_letters else "exit")

    @property
    def longest_drain(self) -> float:
        """Maximum number of seconds from the start of a drain until the handover of a partition without a lease.

        The sum of ``drain_timeout``, ``grace``, 5 s for the last settlement and 10 s for the release by the source.
        """
        return self.drain_timeout + self.grace + SETTLE_WITHIN + RELEASE_WITHIN

    def check_drain(self, allowed: float | None, origin: str = "") -> None:
        """Check that the broker allows the longest drain.

        Args:
            allowed: Seconds that the broker waits for a revoked partition. ``None`` = the broker waits without a limit.
            origin: The setting that determines ``allowed``, for the error.

        Raises:
            ConfigError: The longest drain exceeds ``allowed``.
        """
        if allowed is not None and self.longest_drain > allowed:
            raise ConfigError(
                f"drain_timeout={self.drain_timeout:g} and grace={self.grace:g}, with {SETTLE_WITHIN:g} s for the "
                f"last settlement and {RELEASE_WITHIN:g} s for the release, exceed the {allowed:g} s that the broker "
                f"allows for a drain. Lower drain_timeout or grace, or raise {origin or 'that limit'}"
            )

    def check_partitions(self, name: str, partitions: int | None) -> None:
        """Check that the source has one partition if the order is ``"serial"``.

        Args:
            name: Name of the source.
            partitions: Number of partitions of the source. ``None`` = unknown.

        Raises:
            ConfigError: The order is ``"serial"``, and the source has several partitions.
        """
        if self.order == "serial" and partitions is not None and partitions > 1:
            raise ConfigError(
                f'order="serial": {name} has {partitions} partitions; use order="partition", or a topic or log with '
                "one partition"
            )

    def check_order(self, name: str, *, ordered: bool) -> None:
        """Check that the source can deliver messages in the order of the settings.

        Args:
            name: Name of the source.
            ordered: Whether only one process receives from the broker's consumer.

        Raises:
            ConfigError: Several processes receive from the broker's consumer at once, and the order is not ``"none"``.
        """
        if not ordered and self.order != "none":
            raise ConfigError(
                f'order="{self.order}": several processes receive from one consumer of {name}, so no order can be '
                'kept; use order="none" or shared=False'
            )

    def check_divided(self, name: str) -> None:
        """Check that the settings allow a source that owns pieces of partitions, each with some of the keys.

        Args:
            name: Name of the source.

        Raises:
            ConfigError: The order is ``"partition"`` or ``"serial"``, or several keys share a lane.
        """
        if self.order not in ("key", "none"):
            raise ConfigError(
                f'order="{self.order}": {name} owns ranges of keys, so no process sees a whole partition; use '
                'order="key", or leave out ranges='
            )
        if self.lanes is not None:
            raise ConfigError(
                f"lanes={self.lanes}: the keys of a lane of {name} may have different owners; leave out lanes=, so "
                "that each key has a lane of its own"
            )

    def in_flight_bound(self, allowed: int | None) -> int:
        """Return the effective bound on messages in flight.

        Args:
            allowed: Number of unsettled messages that the broker allows. ``None`` = any number.

        Returns:
            ``max_in_flight``, or its default.

        Raises:
            ConfigError: ``max_in_flight`` or ``concurrency`` is above ``allowed``, or ``batch`` or
                ``max_in_flight_per_partition`` is above the bound.
        """
        name = "concurrency" if self.max_in_flight is None else "max_in_flight"
        if allowed is not None and getattr(self, name) > allowed:
            raise ConfigError(
                f"{name}={getattr(self, name)} is above the {allowed} unsettled messages that the broker's consumer "
                f"allows: lower {name}, or raise the consumer's limit (max_ack_pending)"
            )
        if self.max_in_flight is not None:
            return self.max_in_flight
        bound = max(DEFAULT_MAX_IN_FLIGHT, self.concurrency)
        bound = bound if allowed is None else min(bound, allowed)
        self._check_batch_against(bound)
        self._check_budget_against(bound)
        return bound
