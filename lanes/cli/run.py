"""``lanes run``: a consumer as a service of several worker processes."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import typer

from lanes.cli.kit import EXIT_USAGE, choice, one_line_errors, stop
from lanes.errors import ConfigError
from lanes.loops import BACKENDS, has_trio, has_uvloop
from lanes.service.changes import check_watching
from lanes.service.env_file import variables_of
from lanes.service.logs import LogFormat, open_log
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
    if backend not in BACKENDS:
        stop(f"--backend {backend!r}: must be {', '.join(BACKENDS)}", EXIT_USAGE)
    if backend == "uvloop" and not has_uvloop():
        stop("--backend uvloop: uvloop is not installed; pip install '.[uvloop]' in the checkout of lanes", EXIT_USAGE)
    if backend == "trio" and not has_trio():
        stop("--backend trio: trio is not installed; pip install 'anyio[trio]', or leave --backend out", EXIT_USAGE)
    try:
        parse_target(target)
        if http is not None:
            address_of(http)
        variables = {} if env_file is None else variables_of(env_file)
    except (ConfigError, TargetError) as error:
        stop(str(error).replace("http=", "--http ", 1), EXIT_USAGE)
    if http is not None:
        check_extra("--http")
    if reload:
        check_watching()
    open_log(form, "supervisor")
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
    with one_line_errors():
        raise typer.Exit(asyncio.run(_supervise(service)))


async def _supervise(service: Service) -> int:
    return await Supervisor(service).run()
