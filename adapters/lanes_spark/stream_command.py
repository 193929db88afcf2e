"""``lanes spark stream``: a handler over a Kafka topic, until a signal says stop."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import Any, Final

import typer
from rich.console import Console

from lanes.cli import EXIT_UNUSABLE, choice, stop
from lanes.errors import HandlerHalted, LanesError
from lanes.letter_views import printable
from lanes_spark.command_options import bound, key_of, load, numbers, pairs, settings_of, spark_session
from lanes_spark.kafka_topic import KafkaTopic
from lanes_spark.plan import Effects
from lanes_spark.progress_bar import progress_bar, summary
from lanes_spark.replay import ROWS_PER_BATCH
from lanes_spark.stream import INTERVAL, Stream
from lanes_spark.stream import stream as stream_source

__all__ = ["EXIT_AT_ONCE", "EXIT_HALTED", "Signals", "stream"]

EXIT_HALTED: Final = 1
"""A message was given up under the poison policy ``exit``."""
EXIT_AT_ONCE: Final = 4
"""Stopped at once, by a second signal: the batch under way is handled again."""

_LOOK: Final = 0.2
"""Seconds after which a second signal is seen."""


def stream(
    topic: str = typer.Option(..., help="The Kafka topic.", metavar="NAME", show_default=False),
    servers: str = typer.Option(..., help="Of Kafka.", metavar="HOST:PORT", show_default=False),
    handler: str = typer.Option(
        ..., help="A function, async or plain, of a module that can be imported here.", metavar="MODULE:FUNCTION"
    ),
    checkpoint: str = typer.Option(..., help="A folder to go on from.", metavar="PATH", show_default=False),
    option: list[str] = typer.Option(
        [],
        "-X",
        help="An option of Spark's Kafka connector, as kafka.security.protocol=SSL. Others see it.",
        metavar="NAME=VALUE",
        show_default=False,
    ),
    aligned: bool = typer.Option(True, help="One task reads a whole partition, without a shuffle."),
    keys: list[str] = typer.Option([], help="Only this key; may be repeated.", metavar="KEY", show_default=False),
    slots: str = typer.Option("", help="Only these slots of 65,536, as 0-99,512.", metavar="NUMBERS"),
    partitions: str = typer.Option("", help="Only these partitions, as 0-3,7.", metavar="NUMBERS"),
    from_: str = typer.Option(
        "", "--from", help="The first position, or 0=120,1=80 by partition, or a time with its zone.", metavar="AT"
    ),
    settings: str = typer.Option("", help="The lanes.Settings for the handler.", metavar="MODULE:NAME"),
    dead_letters: str = typer.Option("", help="Makes the place of dead letters.", metavar="MODULE:FUNCTION"),
    setup: str = typer.Option("", help="Before the handler's first message.", metavar="MODULE:FUNCTION"),
    teardown: str = typer.Option("", help="Behind its last one.", metavar="MODULE:FUNCTION"),
    effects: str = typer.Option("unfenced", help="What the handler leaves behind: none, fenced or unfenced."),
    rows_per_batch: int = typer.Option(ROWS_PER_BATCH, help="What a batch has at most."),
    interval: float = typer.Option(INTERVAL, help="Seconds between two looks at a topic that has nothing new."),
    journal: str = typer.Option("", help="A folder, for the journals of all tasks.", metavar="DIR"),
    tasks: int | None = typer.Option(None, help="Of a shuffle.", show_default="4 for each core"),
    master: str = typer.Option("", help="Of Spark.", show_default="what Spark is set to, else local[*]"),
    conf: list[str] = typer.Option([], help="A setting of Spark.", metavar="NAME=VALUE", show_default=False),
) -> None:
    """Run a handler over a Kafka topic for as long as nobody stops it: exit 0 stopped, 1 halted by a message, 3 not
    possible.

    SIGTERM and SIGINT stop it behind the batch under way; a second one at once, and the exit is 4.
    """
    sys.path.insert(0, os.getcwd())
    source = KafkaTopic(servers=servers, topic=topic, options=pairs("-X", option), aligned=aligned)
    arguments: dict[str, Any] = {
        "checkpoint": checkpoint,
        "settings": settings_of(settings),
        "dead_letters": load("--dead-letters", dead_letters) if dead_letters else None,
        "setup": load("--setup", setup) if setup else None,
        "teardown": load("--teardown", teardown) if teardown else None,
        "keys": [key_of(key) for key in keys] or None,
        "slots": numbers("--slots", slots),
        "partitions": numbers("--partitions", partitions),
        "from_": bound("--from", from_),
        "rows_per_batch": rows_per_batch,
        "interval": interval,
        "journal": journal or None,
        "tasks": tasks,
        "effects": choice("--effects", effects, Effects),
    }
    function = load("--handler", handler)
    output = Console(markup=False, emoji=False, highlight=False, soft_wrap=True)
    try:
        with spark_session(master, pairs("--conf", conf)) as session, Signals() as signals, progress_bar() as show:
            if signals.count:
                return
            running = stream_source(session, source, function, **arguments, progress=show)
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
