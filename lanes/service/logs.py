"""The log of a service: lines of text, or one JSON object a line."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Literal

from lanes.dead_letter import printable

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
        return json.dumps(line, ensure_ascii=False)


def open_log(form: LogFormat, process: str) -> None:
    """Write the log of this process to stderr, from level INFO on.

    Args:
        form: ``text`` or ``json``.
        process: Name of the process in each line, such as ``worker 2``.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json(process) if form == "json" else _Text(process))
    # It counts changes of files, which the supervisor names.
    logging.getLogger("watchfiles").setLevel(logging.WARNING)
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def complain(form: LogFormat, line: str) -> None:
    """Write the line that explains the end of the process, as the command line does or as an object of the log."""
    if form == "json":
        logging.getLogger("lanes.run").error("%s", line)
    else:
        sys.stderr.write(f"lanes: {printable(line)}\n")
        sys.stderr.flush()
