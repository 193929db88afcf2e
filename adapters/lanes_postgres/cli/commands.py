"""The commands of PostgreSQL: ``lanes doctor postgres``."""

from __future__ import annotations

from typing import Annotated

import anyio
import typer

from lanes.cli.doctor import conclude
from lanes.cli.kit import EXIT_UNUSABLE, stop, waiting_line
from lanes.errors import ConfigError
from lanes_postgres.advisory_locks import AdvisoryLocks
from lanes_postgres.cli.doctor import examine
from lanes_postgres.names import SCHEMA, check_schema_name

Dsn = Annotated[
    str,
    typer.Option(
        help="Connection string of the database, without a password.",
        metavar="DSN",
        show_default="the PG… variables of the environment",
    ),
]
Schema = Annotated[str, typer.Option(help="Schema of the tables.", metavar="NAME")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def doctor(dsn: Dsn = "", schema: Schema = SCHEMA, as_json: AsJson = False) -> None:
    """Check a PostgreSQL server, the tables and the locks.

    Exit status: 0 = usable, 3 = a check failed. The command changes nothing at the server. Other users can see the
    arguments of a process, so put a password into PGPASSWORD or a password file.
    """
    try:
        check_schema_name(schema)
        AdvisoryLocks(dsn)
    except ConfigError as error:
        stop(str(error), EXIT_UNUSABLE)
    with waiting_line("the PostgreSQL server"):
        checks = anyio.run(examine, dsn, schema, backend="asyncio")
    conclude(checks, as_json=as_json, facts={"schema": schema})
