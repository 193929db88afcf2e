"""Scripts of the calls that the writer of dead letters makes, for the simulated producer and for a real producer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from confluent_kafka import KafkaError, Message

from tests.simulated.kafka.scripts import Seen, Stage

_LONG: Final = 20.0


class Writer:
    """A producer of the records 1, 2 … and its reports."""

    def __init__(self, stage: Stage, settings: dict[str, Any] | None = None, *, reachable: bool = True) -> None:
        self.reports: list[tuple[str | None, int | None]] = []
        self.client = stage.producer(settings or {}, reachable=reachable)
        self._topic = stage.written
        self._count = 0

    def produce(self) -> str:
        """Produce a record. Returns the text of the error if the client refuses the record."""
        self._count += 1
        value = str(self._count).encode()
        try:
            self.client.produce(
                self._topic, value=value, key=None, headers=[("h", value)], partition=0, on_delivery=self._report
            )
        except BufferError as full:
            return str(full)
        return ""

    def _report(self, error: KafkaError | None, message: Message) -> None:
        self.reports.append((None, message.offset()) if error is None else (error.name(), None))


def a_report_has_the_offset_of_its_record(stage: Stage) -> Seen:
    writer = Writer(stage)
    seen: Seen = [writer.produce(), len(writer.client), writer.reports[:], writer.client.flush(_LONG)]
    return [*seen, writer.reports[:], writer.produce(), writer.client.flush(_LONG), writer.reports, len(writer.client)]


def a_full_queue_refuses_a_record_until_a_report_is_served(stage: Stage) -> Seen:
    writer = Writer(stage, {"queue.buffering.max.messages": 1})
    seen: Seen = [writer.produce(), writer.produce(), len(writer.client), writer.client.flush(_LONG)]
    return [*seen, writer.produce(), writer.client.flush(_LONG), writer.reports]


def a_purge_reports_the_records_that_were_not_sent(stage: Stage) -> Seen:
    writer = Writer(stage, reachable=False)
    seen: Seen = [writer.produce(), writer.produce()]
    writer.client.purge()
    # The length of a real client also counts events of its own meanwhile.
    seen.append(writer.reports[:])
    return [*seen, writer.client.flush(_LONG), writer.reports]


def a_record_without_a_broker_times_out(stage: Stage) -> Seen:
    writer = Writer(stage, {"message.timeout.ms": 500}, reachable=False)
    seen: Seen = [writer.produce(), writer.client.flush(0.1), writer.reports[:]]
    return [*seen, writer.client.flush(_LONG), writer.reports]


SCRIPTS: Final[tuple[Callable[[Stage], Seen], ...]] = (
    a_report_has_the_offset_of_its_record,
    a_full_queue_refuses_a_record_until_a_report_is_served,
    a_purge_reports_the_records_that_were_not_sent,
    a_record_without_a_broker_times_out,
)
