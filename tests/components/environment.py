"""The project's own Python environment: `python -m tests.components.environment make|ready LEVEL`.

`make` fills `.venv` with the packages that `pyproject.toml` names for LEVEL. The call is idempotent. A concurrent
second call waits for the first. `ready` only checks, and reports the result by its exit status.

- `run`: the packages of `make run`
- `run-kafka`: the packages of `make run BROKER=kafka`
- `run-postgres`: the packages of `make run BROKER=postgres`
- `run-spark`: the packages of `make run-spark`
- `dev`: all packages

The module needs Python 3.11 with `venv`, or `uv` on PATH. If PATH has no `uv`, the module installs `uv` into the
environment. If `uv` fails, the module uses `pip`. The module writes only to `.venv` and `.cache`.
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
    "run-postgres": "cli,postgres",
    "run-spark": "cli,journal,kafka,postgres,spark",
    "dev": "cli,jetstream,kafka,testing",
}


class EnvironmentFailedError(Exception):
    """The environment cannot be made; the message names the remedy."""


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
    """Whether `.venv` was filled for this level or `dev`, from the present `pyproject.toml`, in the present folder."""
    return _runs(PYTHON) and any(_read(_stamp(one)) == _wanted() for one in {level, "dev"})


def make(level: str) -> None:
    """Make and fill `.venv`. Blocks for up to a minute."""
    print("lanes: setting up .venv, once, which takes about a minute", file=sys.stderr, flush=True)
    LOG.write_text("")
    stamps = [_stamp(one) for one in EXTRAS]
    places = {text.splitlines()[0] for text in map(_read, stamps) if text}
    if not _runs(PYTHON) or places - {str(ROOT)}:
        # The environment is broken, or is a copy whose programs still contain the path of the original.
        shutil.rmtree(VENV, ignore_errors=True)
        _create()
    for stamp in stamps:
        stamp.unlink(missing_ok=True)
    _install(level)
    _stamp(level).write_text(_wanted())  # written last, so an interrupted set-up is never ready


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
    # pip reads settings that uv ignores, so pip may succeed after uv failed. Dependency groups need pip 25.1.
    if _pip("install", "--upgrade", "pip>=25.1") and _pip("install", *wanted):
        return
    raise EnvironmentFailedError(
        f"packages could not be installed ({_reason()}): check the network and the package registry, or "
        f"name a proxy or a mirror by HTTPS_PROXY, PIP_INDEX_URL, UV_DEFAULT_INDEX; full output: {LOG}"
    )


def _pip(*arguments: str) -> bool:
    """Run pip in the environment, and return whether it succeeded. An environment of uv gets pip first."""
    has_pip = _does(str(PYTHON), "-m", "pip", "--version") or _does(str(PYTHON), "-m", "ensurepip")
    return has_pip and _does(str(PYTHON), "-m", "pip", *arguments)


def _has_uv() -> bool:
    # A launcher named uv may select a version that is not installed, so the program must also run.
    return shutil.which("uv") is not None and _does("uv", "--version")


def _does(*command: str) -> bool:
    """Run a command in the project folder, write its output to the log, and return whether the command succeeded."""
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
                process_group=0,  # pip starts further processes, which must end together with it
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
    """End an installer as Ctrl+C does, so that the installer removes its temporary files.

    Blocks until the installer has ended.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):  # the installer has just ended
        os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _reason() -> str:
    """The last line that the failed command printed."""
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
