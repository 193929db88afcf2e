"""The jars of Spark's connector to Kafka, which the first call fetches into `.cache`.

`python -m tests.components.spark_connector` prints the paths of the jars, separated by commas, for the setting
`spark.jars`.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import sys
from pathlib import Path

from tests.components.java import fetch_jars, find_java
from tests.components.supervised import MissingComponent

CACHE = Path(__file__).resolve().parents[2] / ".cache"
_POM = Path(__file__).parent / "spark" / "pom.xml"
_NAME = "Spark's Kafka connector"


def connector_jars() -> list[Path]:
    """Return the paths of the jars, for `spark.jars`. Idempotent; the first call may block for minutes.

    Raises `MissingComponent` without Java, Maven or access to the jars.
    """
    folder = CACHE / "spark" / hashlib.sha256(_POM.read_bytes()).hexdigest()[:16]
    stamp = folder / "ready"
    if not stamp.is_file():
        java = find_java(_NAME)
        CACHE.mkdir(exist_ok=True)
        with (CACHE / "spark.lock").open("w") as lock:
            # The end of a process frees its lock.
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not stamp.is_file():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
                log = CACHE / "spark.log"
                log.write_text("")
                fetch_jars(java, _POM, folder / "jars", repository=CACHE / "m2", log=log, wanted_by=_NAME)
                stamp.touch()  # last, so an interrupted set-up is never ready
    return sorted((folder / "jars").glob("*.jar"))


def main() -> int:
    """Print the paths of the jars, and return the exit status. Blocks like `connector_jars`."""
    try:
        print(*connector_jars(), sep=",")
    except MissingComponent as missing:
        print(f"components: {missing}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
