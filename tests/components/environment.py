"""`python -m tests.components.environment make|ready LEVEL`: the project's own Python environment.

`make` brings `.venv` to what `pyproject.toml` asks for. LEVEL is `run`, what `make run` needs; `run-kafka`, what it
needs with `BROKER=kafka`; `run-spark`, what `make run-spark` needs; or `dev`, everything. It is idempotent, and a
second one at the same time waits for the first. `ready` only looks, and is its exit status. Works with any Python 3.11
that has `venv`, or with `uv` on PATH, and needs nothing else: `uv` is fetched into the environment when it is not
there, and `pip` does the work when there is no `uv` to be had.

All it writes is in `.venv` and `.cache`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from tests.components.alone import alone

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv"
CACHE = ROOT / ".cache"
LOG = CACHE / "environment.log"
PYTHON = VENV / "bin" / "python"
EXTRAS = {
    "run": "cli,jetstream",
    "run-kafka": "cli,kafka",
    "run-spark": "cli,journal,kafka,postgres,spark",
    "dev": "cli,jetstream,kafka,testing",
}


class EnvironmentFailedError(Exception):
    """The environment cannot be made; the message says what to do about it."""


def main(arguments: list[str]) -> int:
    if len(arguments) != 2 or arguments[0] not in ("make", "ready") or arguments[1] not in EXTRAS:
        print(f"usage: python -m tests.components.environment make|ready {'|'.join(EXTRAS)}", file=sys.stderr)
        return 2
    verb, level = arguments
    if verb == "ready":
        return 0 if is_ready(level) else 1
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    try:
        with alone(CACHE / "environment.lock", ".venv"):
            if not is_ready(level):
                make(level)
    except EnvironmentFailedError as error:
        print(f"lanes: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


def is_ready(level: str) -> bool:
    """Whether `.venv` was filled for this level, from this `pyproject.toml`, in this place."""
    return _runs(PYTHON) and any(_read(_stamp(one)) == _wanted() for one in {level, "dev"})


def make(level: str) -> None:
    """Make and fill `.venv`. Blocks, for seconds to a minute."""
    print("lanes: setting up .venv, once", file=sys.stderr, flush=True)
    LOG.write_text("")
    stamps = [_stamp(one) for one in EXTRAS]
    places = {text.splitlines()[0] for text in map(_read, stamps) if text}
    if not _runs(PYTHON) or places - {str(ROOT)}:
        # Broken, or copied from elsewhere: its programs still point to where they came from.
        shutil.rmtree(VENV, ignore_errors=True)
        _create()
    for stamp in stamps:
        stamp.unlink(missing_ok=True)
    _install(level)
    _stamp(level).write_text(_wanted())  # last: an interrupted set-up is not taken for a finished one


def _create() -> None:
    if _has_uv() and _does("uv", "venv", "--python", sys.executable, str(VENV)):
        return
    if not _does(sys.executable, "-m", "venv", str(VENV)):
        shutil.rmtree(VENV, ignore_errors=True)
        raise EnvironmentFailedError(
            f"{sys.executable} cannot make an environment ({_reason()}): install its venv module "
            "(Debian, Ubuntu: apt install python3-venv), or uv"
        )


def _install(level: str) -> None:
    wanted = ["-e", f".[{EXTRAS[level]}]", "--group", level]
    if _has_uv():
        if _does("uv", "pip", "install", "--python", str(PYTHON), *wanted):
            return
    elif _pip("install", "uv") and _does(str(PYTHON), "-m", "uv", "pip", "install", *wanted):
        return
    # pip reads settings that uv does not, so it gets its try; groups need a pip of 2025.
    if _pip("install", "--upgrade", "pip>=25.1") and _pip("install", *wanted):
        return
    raise EnvironmentFailedError(
        f"packages could not be installed ({_reason()}): is there a network, and a package registry? "
        f"A proxy or a mirror is named by HTTPS_PROXY, PIP_INDEX_URL, UV_DEFAULT_INDEX. All of it: {LOG}"
    )


def _pip(*arguments: str) -> bool:
    """Run the environment's own pip, which an environment made by uv gets first."""
    has_pip = _does(str(PYTHON), "-m", "pip", "--version") or _does(str(PYTHON), "-m", "ensurepip")
    return has_pip and _does(str(PYTHON), "-m", "pip", *arguments)


def _has_uv() -> bool:
    # Found is not enough: a launcher of that name may stand for a version that is not installed.
    return shutil.which("uv") is not None and _does("uv", "--version")


def _does(*command: str) -> bool:
    """Run a command in the project folder, its output in the log; whether it succeeded."""
    own = {
        "UV_CACHE_DIR": str(CACHE / "uv"),
        "UV_PYTHON_DOWNLOADS": "never",
        "PIP_CACHE_DIR": str(CACHE / "pip"),
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_REQUIRE_VIRTUALENV": "1",
    }
    with LOG.open("a") as log:
        print("$", *command, file=log, flush=True)
        try:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=own | os.environ | {"VIRTUAL_ENV": str(VENV)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,  # pip starts more of its kind: they are stopped together
            )
        except OSError as error:
            print(error, file=log)
            return False
        try:
            return process.wait() == 0
        except BaseException:
            _interrupt(process)
            raise


def _interrupt(process: subprocess.Popen[bytes]) -> None:
    """Stop an installer as Ctrl+C would: it then removes its temporary files. Blocks until it is gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended just now
        os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _reason() -> str:
    """What the last command said before it gave up."""
    lines = [line.strip() for line in LOG.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "no reason given"


def _runs(python: Path) -> bool:
    check = "import sys; sys.exit(sys.version_info < (3, 11))"
    try:
        return subprocess.run([python, "-I", "-S", "-c", check], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def _wanted() -> str:
    return f"{ROOT}\n{hashlib.sha256((ROOT / 'pyproject.toml').read_bytes()).hexdigest()}\n"


def _stamp(level: str) -> Path:
    return VENV / f"ready-{level}"


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
