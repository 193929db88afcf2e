"""``lanes run``: a consumer as a service of several worker processes."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import NoReturn

import typer

from lanes.cli.kit import EXIT_INTERRUPTED, EXIT_UNUSABLE, EXIT_USAGE, choice
from lanes.errors import ConfigError, LanesError
from lanes.loops import BACKENDS, has_trio, has_uvloop
from lanes.service.changes import check_watching
from lanes.service.env_file import variables_of
from lanes.service.logs import LogFormat, complain, open_log
from lanes.service.supervisor import Service, Supervisor
from lanes.service.target import TargetError, parse_target
from lanes.web.opening import check_extra
from lanes.web.settings import address_of


def run(
    target: str = typer.Argument(
        help="A Consumer, or a function that makes one, as module:name.", metavar="TARGET", show_default=False
    ),
    workers: int = typer.Option(1, help="Number of worker processes.", min=1, max=1024, metavar="NUMBER"),
    reload: bool = typer.Option(False, "--reload", help="Drain and restart the workers when a file changes."),
    http: str | None = typer.Option(
        None, help="Address of probes, status and metrics.", metavar="HOST:PORT", show_default=False
    ),
    env_file: Path | None = typer.Option(
        None, help="File with NAME=VALUE lines for the workers.", metavar="FILE", show_default=False
    ),
    log: str = typer.Option("text", help="Format of the log: text or json.", metavar="FORMAT"),
    backend: str = typer.Option("asyncio", help="Event loop: asyncio, auto, trio or uvloop.", metavar="NAME"),
) -> None:
    """Run a consumer as a service of several processes.

    TARGET names a `lanes.Consumer` in a module of the current folder or of the environment, such as `app:consumer`, or
    a function that returns one. The function may be async. Each worker is a process with a consumer of its own; the
    command restarts a worker that dies. A first SIGTERM or Ctrl-C drains all workers, a second one stops them at once.
    """
    form: LogFormat = choice("--log", log, LogFormat)
    open_log(form, "supervisor")
    if backend not in BACKENDS:
        _stop(form, f"--backend {backend!r}: must be {', '.join(BACKENDS)}", EXIT_USAGE)
    if backend == "uvloop" and not has_uvloop():
        _stop(
            form,
            "--backend uvloop: uvloop is not installed; pip install '.[uvloop]' in the checkout of lanes",
            EXIT_USAGE,
        )
    if backend == "trio" and not has_trio():
        _stop(
            form, "--backend trio: trio is not installed; pip install 'anyio[trio]', or leave --backend out", EXIT_USAGE
        )
    try:
        parse_target(target)
        if http is not None:
            address_of(http)
        variables = {} if env_file is None else variables_of(env_file)
    except (ConfigError, TargetError) as error:
        _stop(form, str(error).replace("http=", "--http ", 1), EXIT_USAGE)
    try:
        if http is not None:
            check_extra("--http")
        if reload:
            check_watching()
        service = Service(
            target=target,
            workers=workers,
            backend=backend,
            log=form,
            # The environment of the command has priority.
            environment={name: value for name, value in variables.items() if name not in os.environ},
            http=http,
            reload=os.getcwd() if reload else None,
        )
        status = asyncio.run(_supervise(service))
    except LanesError as error:
        _stop(form, str(error), EXIT_UNUSABLE)
    except KeyboardInterrupt:
        _stop(form, "interrupted", EXIT_INTERRUPTED)
    raise typer.Exit(status)


def _stop(form: LogFormat, text: str, status: int) -> NoReturn:
    """End the process with one line on stderr, in the format of the log."""
    complain(form, text)
    sys.exit(status)


async def _supervise(service: Service) -> int:
    return await Supervisor(service).run()
