"""Errors of Spark made errors of ``lanes``, and those of ``lanes`` made what Spark carries: text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final
from urllib.parse import quote, unquote

from lanes.errors import ConfigError, ContractError, HandlerHalted, LanesError, MessageError, SourceError

_ERRORS: Final[Mapping[str, type[LanesError]]] = {
    kind.__name__: kind for kind in (ConfigError, ContractError, HandlerHalted, LanesError, MessageError)
}
_NOTE_SAFE: Final = ",.:;()[]/=+@_-"
_NOTE: Final = re.compile(
    rf"lanes-error: ([A-Za-z]+) (passes|stays) ((?:[A-Za-z0-9~{re.escape(_NOTE_SAFE)}]|%[0-9A-F]{{2}})*)"
)
"""What an error of ``lanes`` has behind it where it leaves a process: its kind, whether it is retryable, and its text,
quoted, for whatever carries it may do something to lines, quotes and backslashes: a letter of an escape may stand in
front of it, and one that begins an escape behind."""

_OURS: Final = re.compile(r"^(?:Caused by: |: )?(?:[\w.]+: )?lanes\.errors\.(\w+): (.+)$", re.MULTILINE)
_RAISED: Final = re.compile(r"^(?:Caused by: |: )?([A-Za-z_][\w.]*(?:Error|Exit|Exception): .+)$", re.MULTILINE)

_FILE: Final = re.compile(r"\[FAILED_READ_FILE[^\]\n]*\] Encountered error while reading file [^\n]*?\.(?=\s)")

_REMEDIES: Final[Mapping[re.Pattern[str], str]] = {
    re.compile(pattern): remedy
    for pattern, remedy in {
        r"PYTHON_VERSION_MISMATCH": "let PYSPARK_PYTHON name a Python of the driver's minor version",
        r"No module named '(?:lanes|pyarrow|anyio|blake3)": (
            "the workers' Python lacks it: let PYSPARK_PYTHON name one that has lanes-runtime[spark]"
        ),
        r"Python worker exited unexpectedly": (
            "it was killed, often for memory, or ended itself: its last words are in the executor's stderr"
        ),
        r"CONCURRENT_STREAM_LOG_UPDATE|CONCURRENT_QUERY|another query with same id|is already active": (
            "another replay is at this checkpoint: wait until it has ended, or stop it"
        ),
        r"FAILED_READ_FILE": "restore the file, or take it out of the table: nothing is left out without a word",
        r"Python worker failed to connect back": (
            "it did not start in time: the machine is too busy, or PYSPARK_PYTHON names what does not run"
        ),
        r"^(?:Py4JError|Py4JNetworkError|Connection\w*Error)$": (
            "the JVM of the driver does not answer any more: it was killed, often for memory, or ended; its last "
            "words are on stderr, and `lanes doctor spark` looks at memory"
        ),
        r"PATH_ALREADY_EXISTS": "let results_to= name a folder that is not there yet",
        r"terminated with exception: assertion failed|Incomplete log file|MALFORMED_LOG": (
            "the checkpoint is damaged: restore it, or begin with another one, by from_= behind what was handled"
        ),
        r"No FileSystem for scheme|ClassNotFoundException: Class org\.apache\.hadoop\.fs": (
            "Spark lacks the jars of that file system: name them by spark.jars.packages"
        ),
    }.items()
}
"""What to do about some of what Spark says, which does not say that itself."""

_LIMIT: Final = 500
"""Characters of what Spark says that are kept."""


@contextmanager
def crossing() -> Iterator[None]:
    """What ``lanes`` raises in the block comes out with a note, by which ``as_ours`` knows it again in what Spark has
    made of it."""
    try:
        yield
    except LanesError as error:
        passes = "passes" if isinstance(error, SourceError) and error.retryable else "stays"
        # In one line, as all that Spark says: a driver of a database says more than one.
        said = " ".join(line.strip() for line in str(error).splitlines() if line.strip())
        text = quote(said, safe=_NOTE_SAFE, errors="replace")
        error.add_note(f"lanes-error: {type(error).__name__} {passes} {text}")
        raise


@contextmanager
def mapped_errors(topic: str) -> Iterator[None]:
    """What Spark raises in the block comes out as an error of ``lanes``: as the one that a task raised, where it did,
    else as a ``SourceError``. ``topic`` is what it names."""
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]
    from pyspark.errors import PySparkException

    try:
        yield
    except (PySparkException, Py4JError, ConnectionError) as error:
        raise as_ours(topic, type(error).__name__, str(error)) from error


def as_ours(topic: str, name: str, text: str) -> LanesError:
    """The error of ``lanes`` for an exception of Spark of that name and text, which holds what the workers raised: with
    its text, in one line, and its ``retryable``. What caused it there is told by the traceback in Spark's text alone.
    """
    noted = _NOTE.findall(text)
    if noted:
        kind, passes, quoted = noted[-1]
        said = unquote(quoted, errors="replace")
        return _ERRORS[kind](said) if kind in _ERRORS else SourceError(said, retryable=passes == "passes")
    # Of what was raised where nobody has noted it.
    ours = _OURS.findall(text)
    if ours:
        kind, said = ours[-1]
        return _ERRORS.get(kind, SourceError)(said)
    # The innermost exception says most; these only say that there was one.
    raised = [line for line in _RAISED.findall(text) if not line.startswith("py4j.") and "Traceback (most" not in line]
    said = (raised or [line.strip() for line in text.splitlines() if line.strip()][:1] or ["it says nothing"])[-1]
    if file := _FILE.search(text):
        # Which file it is, stands at the outside.
        said = f"{file[0].strip()} {said}" if file[0].strip() not in said else said
    remedy = next((found for pattern, found in _REMEDIES.items() if pattern.search(said) or pattern.search(name)), "")
    return SourceError(f"{topic}: Spark failed: {name}: {said[:_LIMIT]}" + (f"; {remedy}" if remedy else ""))
