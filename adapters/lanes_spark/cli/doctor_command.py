"""The command ``lanes doctor spark``, for ``lanes.cli.app``."""

from __future__ import annotations

import typer

from lanes.cli.app import choice, command_group
from lanes.cli.doctor import conclude
from lanes_spark.cli.doctor import examine
from lanes_spark.cli.options import EffectsName, Master, SparkConf, pairs
from lanes_spark.plan import Effects

__all__ = ["doctor"]


def doctor() -> typer.Typer:
    """``lanes doctor spark``. A ``ConfigError`` of the command is for the caller to show."""
    commands = command_group()

    @commands.command()
    def spark(
        master: Master = "",
        conf: SparkConf = [],  # noqa: B006 (typer copies it)
        kafka: bool = typer.Option(False, "--kafka", help="A Kafka topic is to be read: its connector is needed."),
        effects: EffectsName = "unfenced",
        checkpoint: str = typer.Option("", help="The folder that a replay is to use.", metavar="PATH"),
        as_json: bool = typer.Option(False, "--json", help="Print JSON."),
    ) -> None:
        """Check what a replay on Spark needs of this machine: exit 0 usable, 3 not.

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

    return commands
