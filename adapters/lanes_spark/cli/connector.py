"""The jars of Spark's connector to Kafka: which there must be, where they are looked for, and how to get them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import unquote, urlsplit

__all__ = ["CONNECTOR", "Jars", "coordinates", "find_jars", "spark_jar"]

CONNECTOR: Final = "spark-sql-kafka-0-10"

_NEEDED: Final = (CONNECTOR, "spark-token-provider-kafka-0-10", "kafka-clients", "commons-pool2")
_NAME: Final = re.compile(rf"({'|'.join(_NEEDED)})(?:_(\d+\.\d+))?-(\d[\w.\-]*?)\.jar")
_CORE: Final = re.compile(r"spark-core_(\d+\.\d+)-(\d[\w.\-]*?)\.jar")


class Jars(NamedTuple):
    """``found``: by name, of which Scala and version, and where. ``missing``: the names of those that were not found.
    ``package``: of which Scala and version Spark is told to fetch the connector when a session begins, with all that
    belongs to it. ``unseen``: what is not on this machine, or cannot be read here."""

    found: Mapping[str, tuple[str, str, Path]]
    missing: tuple[str, ...]
    package: tuple[str, str] | None
    unseen: tuple[str, ...]


def spark_jar(home: Path) -> tuple[str, str] | None:
    """The versions of Scala and Spark in that folder; None = there is no Spark."""
    for path in sorted((home / "jars").glob("spark-core_*.jar")):
        if found := _CORE.fullmatch(path.name):
            return found[1], found[2]
    return None


def coordinates(scala: str, version: str) -> str:
    """What ``spark.jars.packages`` has to name."""
    return f"org.apache.spark:{CONNECTOR}_{scala}:{version}"


def find_jars(home: Path, conf: Mapping[str, str]) -> Jars:
    """Look where a session of these settings would: Spark's own folder, ``spark.jars``, the driver's class path, and
    the names of packages. Nothing is fetched."""
    found: dict[str, tuple[str, str, Path]] = {}
    unseen: list[str] = []
    for path in _jars(home, conf, unseen):
        if (name := _NAME.fullmatch(path.name)) and path.is_file():
            found.setdefault(name[1], (name[2] or "", name[3], path))
    package = None
    for one in conf.get("spark.jars.packages", "").split(","):
        parts = one.strip().split(":")
        if len(parts) == 3 and parts[1].startswith(f"{CONNECTOR}_"):
            package = parts[1].removeprefix(f"{CONNECTOR}_"), parts[2]
    return Jars(found, tuple(name for name in _NEEDED if name not in found), package, tuple(unseen))


def _jars(home: Path, conf: Mapping[str, str], unseen: list[str]) -> Iterator[Path]:
    yield from sorted((home / "jars").glob("*.jar"))
    for named in filter(None, (word.strip() for word in conf.get("spark.jars", "").split(","))):
        place = urlsplit(named)
        path = Path(unquote(place.path) if place.scheme == "file" else named)
        if place.scheme not in ("", "file", "local") or not path.exists():
            unseen.append(named)
        else:
            yield path
    for word in filter(None, conf.get("spark.driver.extraClassPath", "").split(":")):
        path = Path(word)
        yield from sorted(path.parent.glob("*.jar")) if path.name == "*" else [path]
