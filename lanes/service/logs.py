"""The log of a service: lines of text, or one JSON object a line."""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from types import TracebackType
from typing import Any, Literal

from lanes.dead_letter import printable
from lanes.process import write_lines_as

log = logging.getLogger("lanes.run")

LogFormat = Literal["text", "json"]


class _Text(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)s {process} %(name)s: %(message)s")


class _Json(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Return a record as one line; see ``logging.Formatter``."""
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{at}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = self.formatStack(record.stack_info)
        # In ASCII, because stderr may have any encoding.
        return json.dumps(line)

    def line(self, text: str, level: str) -> str:
        """Return a text from outside of the log as a line of the log, without a lock."""
        number = logging.getLevelNamesMapping()[level]
        return self.format(logging.LogRecord(log.name, number, "", 0, text, None, None)) + "\n"


class _JsonHandler(logging.StreamHandler[Any]):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (the name of logging)
        """Log a record whose text cannot be made, instead of printing a traceback as text."""
        error = sys.exc_info()[1]
        # Not for an error of stderr itself, which would fail again.
        if not isinstance(error, OSError):
            log.error(
                "a line of the logger %s cannot be written (%s): %s; correct the call in %s, line %d",
                record.name,
                type(error).__name__,
                printable(str(record.msg)),
                record.pathname,
                record.lineno,
            )


def open_log(form: LogFormat, process: str) -> None:
    """Write the log of this process to stderr, at level INFO and above.

    With ``json``, warnings of Python, and errors that end the process or a thread, become lines of the log too.

    Args:
        form: ``text`` or ``json``.
        process: Name of the process in each line, such as ``worker 2``.
    """
    handler: logging.Handler
    if form == "json":
        objects = _Json(process)
        handler = _JsonHandler(sys.stderr)
        handler.setFormatter(objects)
        write_lines_as(objects.line)
        logging.captureWarnings(True)
        sys.excepthook = _ended_process
        threading.excepthook = _ended_thread
        sys.unraisablehook = _ignored
    else:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(_Text(process))
    # It counts changes of files, which the supervisor names.
    logging.getLogger("watchfiles").setLevel(logging.WARNING)
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def _ended_process(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    log.error("an error ends the process", exc_info=(kind, error, traceback))


def _ended_thread(ended: threading.ExceptHookArgs) -> None:
    if ended.exc_value is not None and not isinstance(ended.exc_value, SystemExit):
        name = "" if ended.thread is None else ended.thread.name
        log.error("an error ends the thread %r", name, exc_info=ended.exc_value)


def _ignored(ignored: Any) -> None:
    # The text of the object may be long, and may contain user data.
    log.error("an error in a %s is ignored", type(ignored.object).__name__, exc_info=ignored.exc_value)


def complain(form: LogFormat, line: str) -> None:
    """Write the line that explains the end of the process, as the command line does or as an object of the log."""
    if form == "json":
        log.error("%s", line)
    else:
        sys.stderr.write(f"lanes: {printable(line)}\n")
        sys.stderr.flush()
