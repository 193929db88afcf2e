"""Programs of the supported nats-server versions, and of an older one."""

from __future__ import annotations

from pathlib import Path

from tests.components import MissingComponent
from tests.components.nats_versions import fetch_program
from tests.conftest import skip_or_fail

OLDER = "2.10"


SUPPORTED = ["2.11", "2.12", "2.14"]


def program(version: str) -> Path:
    """Path of the program. Without it the test is skipped, or fails if ``CI`` is set."""
    try:
        return fetch_program(version)
    except MissingComponent as missing:
        skip_or_fail(missing)
