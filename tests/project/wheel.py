"""The wheel in empty environments: ``python -m tests.project.wheel``.

Builds the wheel, and installs it in a new environment of the oldest and of the newest Python of this machine. Each
environment imports the public packages, and runs the two programs of the README on a real Kafka and a real NATS server.
The working directory has no checkout, so every import comes from the wheel.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.components import running

ROOT: Final = Path(__file__).parents[2]
OLDEST: Final = (3, 11)
EXTRAS: Final = "cli,jetstream,kafka,otel,web"
IMPORTS: Final = "import lanes, lanes.web, lanes_jetstream, lanes_kafka, memsource; print(lanes.__file__)"
ORDERS: Final = 4
SECONDS: Final = 90.0

PROGRAMS: Final = {"kafka": ("orders", "purchases"), "nats": ("ORDERS", "PURCHASES")}
"""Server → the topic or stream of the program that publishes, and the one of the README."""

PAGES: Final = {"kafka": "kafka", "nats": "jetstream"}


def main() -> int:
    """Check the wheel, print a line for each step, and return the exit status."""
    with tempfile.TemporaryDirectory() as name, running("nats", "kafka") as urls:
        folder = Path(name)
        call(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", folder, ROOT, cwd=folder)
        (wheel,) = folder.glob("*.whl")
        print(wheel.name, flush=True)
        for number, interpreter in enumerate(pythons()):
            place = folder / f"environment-{number}"
            call(interpreter, "-m", "venv", place, cwd=folder)
            python = place / "bin" / "python"
            call(python, "-m", "pip", "install", "--quiet", f"{wheel}[{EXTRAS}]", cwd=folder)
            version = call(python, "--version", cwd=folder).strip()
            where = call(python, "-c", IMPORTS, cwd=folder).strip()
            assert Path(where).is_relative_to(place), f"{version} imports lanes from {where}"
            call(place / "bin" / "lanes", "--help", cwd=folder)
            for server, url in urls.items():
                handled(python, server, url, str(number), folder)
                print(f"{version}: the README's program for {server} handled {ORDERS} orders", flush=True)
    return 0


def pythons() -> list[str]:
    """Return the oldest and the newest Python here that is not older than ``OLDEST``; one if they are equal."""
    found: dict[tuple[int, int], str] = {}
    for each in candidates():
        told = subprocess.run([each, "-c", "import sys, venv; print(*sys.version_info[:2])"], capture_output=True)
        if told.returncode == 0:
            major, minor = map(int, told.stdout.split())
            if (major, minor) >= OLDEST:
                found.setdefault((major, minor), each)
    return [found[version] for version in dict.fromkeys((min(found), max(found)))]


def candidates() -> Iterator[str]:
    """Return the interpreters on the path and those of pyenv."""
    yield sys.executable
    yield from filter(None, (shutil.which(f"python3.{minor}") for minor in range(OLDEST[1], 30)))
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    yield from map(str, sorted(root.glob("versions/3.*/bin/python")))


def handled(python: Path, server: str, url: str, suffix: str, folder: Path) -> None:
    """Publish orders by the program of the start page, and handle them by the program of the README."""
    there, here = PROGRAMS[server]
    environment = {**os.environ, f"{server.upper()}_URL": url}
    # Each environment has a topic and a stream of its own.
    named = here + suffix
    page = (ROOT / "docs" / "start" / f"{PAGES[server]}.md").read_text()
    publish = block(page, server).replace(there, named).replace(there.lower() + ".", named.lower() + ".")
    call(python, "-W", "error", "-c", publish, cwd=folder, env=environment)
    program = (
        block((ROOT / "README.md").read_text(), server)
        .replace(here, named)
        .replace(here.lower() + ".", named.lower() + ".")
    )
    file = folder / f"{server}{suffix}.py"
    file.write_text(program)
    with subprocess.Popen(
        [python, "-W", "error", file], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        signal.signal(signal.SIGALRM, lambda *_: process.kill())
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        lines = [process.stdout.readline() for _ in range(ORDERS)]
        process.terminate()
        process.wait()
        signal.setitimer(signal.ITIMER_REAL, 0.0)
    assert all(line.startswith("charge ") for line in lines), f"{server}: {lines}"
    assert process.returncode == 0, f"{server}: the program ended with {process.returncode}"


def block(page: str, server: str) -> str:
    """Return the first program of a page for a server."""
    found = re.search(rf"^```python {server}\b[^\n]*\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert found is not None, f"no program for {server}"
    return found[1]


def call(*command: object, cwd: Path, env: dict[str, str] | None = None) -> str:
    """Run a command in a folder without the checkout's paths, and return its output."""
    clean = {name: value for name, value in (env or os.environ).items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=clean, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
