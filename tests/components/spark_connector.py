"""The jars of Spark's connector to Kafka, fetched once, into `.cache`.

`python -m tests.components.spark_connector` prints their paths, separated by commas, as `spark.jars` wants them.
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
    """Where they are, for `spark.jars`. Idempotent; blocks, the first time for up to minutes.

    MissingComponent without Java, Maven or a way to the jars.
    """
    folder = CACHE / "spark" / hashlib.sha256(_POM.read_bytes()).hexdigest()[:16]
    stamp = folder / "ready"
    if not stamp.is_file():
        java = find_java(_NAME)
        CACHE.mkdir(exist_ok=True)
        with (CACHE / "spark.lock").open("w") as lock:
            # No dead process holds it.
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not stamp.is_file():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
                log = CACHE / "spark.log"
                log.write_text("")
                fetch_jars(java, _POM, folder / "jars", repository=CACHE / "m2", log=log, wanted_by=_NAME)
                stamp.touch()  # last: an interrupted one is not taken for a finished one
    return sorted((folder / "jars").glob("*.jar"))


def main() -> int:
    """Print them; returns an exit status. Blocks as `connector_jars` does."""
    try:
        print(*connector_jars(), sep=",")
    except MissingComponent as missing:
        print(f"components: {missing}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
