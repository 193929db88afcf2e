"""The command ``lanes doctor spark``. A ``ConfigError`` is for the caller to show."""

from __future__ import annotations

import typer

from lanes.cli.doctor import conclude
from lanes.cli.kit import choice
from lanes_spark.cli.doctor import examine
from lanes_spark.cli.options import EffectsName, Master, SparkConf, pairs
from lanes_spark.plan import Effects

__all__ = ["doctor"]


def doctor(
    master: Master = "",
    conf: SparkConf = [],  # noqa: B006 (typer copies it)
    kafka: bool = typer.Option(False, "--kafka", help="A Kafka topic is to be read: its connector is needed."),
    effects: EffectsName = "unfenced",
    checkpoint: str = typer.Option("", help="The folder that a replay is to use.", metavar="PATH"),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Check what Spark finds on this machine. Exit 0 usable, 3 not.

    Begins no session and leaves nothing behind. Java and the workers' Python have 20 seconds each to answer.
    """
    checks = examine(
        master=master,
        conf=pairs("--conf", conf),
        effects=choice("--effects", effects, Effects),
        kafka=kafka,
        checkpoint=checkpoint,
    )
    conclude(checks, as_json=as_json)
