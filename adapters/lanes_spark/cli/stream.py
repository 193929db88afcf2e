"""``lanes spark stream``: a handler over a Kafka topic, until a signal says stop."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import Annotated, Any, Final

import typer
from rich.console import Console

from lanes.cli.kit import EXIT_UNUSABLE, stop
from lanes.cli.views import printable
from lanes.errors import HandlerHalted, LanesError
from lanes.process import EXIT_AT_ONCE, EXIT_HALTED
from lanes_spark.cli.options import (
    EffectsName,
    FirstPosition,
    Handler,
    Journal,
    KafkaOptions,
    Keys,
    LetterMaker,
    Master,
    Partitions,
    SettingsName,
    Setup,
    Slots,
    SparkConf,
    Tasks,
    Teardown,
    arguments_of,
    load,
    pairs,
    spark_session,
)
from lanes_spark.cli.progress_bar import progress_bar, summary
from lanes_spark.driver.replay import ROWS_PER_BATCH
from lanes_spark.driver.stream import INTERVAL, Stream
from lanes_spark.driver.stream import stream as stream_source
from lanes_spark.tables.kafka_topic import KafkaTopic

__all__ = ["Signals", "stream"]

_LOOK: Final = 0.2
"""Seconds after which a second signal is seen."""


def stream(
    topic: Annotated[str, typer.Option(help="The Kafka topic.", metavar="NAME", show_default=False)],
    servers: Annotated[str, typer.Option(help="Of Kafka.", metavar="HOST:PORT", show_default=False)],
    handler: Handler,
    checkpoint: Annotated[str, typer.Option(help="A folder to go on from.", metavar="PATH", show_default=False)],
    option: KafkaOptions = [],  # noqa: B006 (typer copies it)
    aligned: bool = typer.Option(True, help="One task reads a whole partition, without a shuffle."),
    keys: Keys = [],  # noqa: B006 (typer copies it)
    slots: Slots = "",
    partitions: Partitions = "",
    from_: FirstPosition = "",
    settings: SettingsName = "",
    dead_letters: LetterMaker = "",
    setup: Setup = "",
    teardown: Teardown = "",
    effects: EffectsName = "unfenced",
    rows_per_batch: int = typer.Option(ROWS_PER_BATCH, help="What a batch has at most."),
    interval: float = typer.Option(INTERVAL, help="Seconds between two looks at a topic that has nothing new."),
    journal: Journal = "",
    tasks: Tasks = None,
    master: Master = "",
    conf: SparkConf = [],  # noqa: B006 (typer copies it)
) -> None:
    """Run a handler over a Kafka topic until it is stopped. Exit 0 stopped, 3 not possible, 5 halted by a message.

    SIGTERM and SIGINT stop it behind the batch under way; a second one at once, and the exit is 4.
    """
    sys.path.insert(0, os.getcwd())
    source = KafkaTopic(servers=servers, topic=topic, options=pairs("-X", option), aligned=aligned)
    arguments = arguments_of(
        settings=settings,
        dead_letters=dead_letters,
        setup=setup,
        teardown=teardown,
        keys=keys,
        slots=slots,
        partitions=partitions,
        from_=from_,
        rows_per_batch=rows_per_batch,
        journal=journal,
        tasks=tasks,
        effects=effects,
    )
    function = load("--handler", handler)
    output = Console(markup=False, emoji=False, highlight=False, soft_wrap=True)
    try:
        with spark_session(master, pairs("--conf", conf)) as session, Signals() as signals, progress_bar() as show:
            if signals.count:
                return
            running = stream_source(
                session, source, function, checkpoint=checkpoint, interval=interval, **arguments, progress=show
            )
            at_once = signals.wait(running)
            report = running.report
    except HandlerHalted as error:
        stop(printable(str(error)), EXIT_HALTED)
    except LanesError as error:
        stop(printable(str(error)), EXIT_UNUSABLE)
    output.print(summary(report))
    if at_once:
        raise typer.Exit(EXIT_AT_ONCE)


class Signals:
    """SIGTERM and SIGINT while this lasts; ``count`` of them have come. To be made in the main thread, behind the
    session of Spark, which has a handler of its own."""

    def __init__(self) -> None:
        self.count = 0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Signals:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._received)
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def wait(self, running: Stream) -> bool:
        """Wait for its end: in order behind a first signal, at once behind a second one; whether it was that. Raises
        what ``Stream.join`` raises."""
        stopped = False
        while not running.join(_LOOK):
            if self.count > 1:
                running.cancel()
                running.join()
                return True
            if self.count and not stopped:
                stopped = True
                running.stop()
        return False

    def _received(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        name = signal.Signals(number).name
        what = "stopping behind the batch under way; once more to stop at once"
        os.write(2, f"lanes: {name}: {what if self.count == 1 else 'stopping at once'}\n".encode())
