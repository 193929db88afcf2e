"""How the rows of a replay get to the tasks of Spark, and why so. Pure: it decides, and asks Spark nothing.

Rows of a key must come to one task, in the order of their positions, and mixed with those of other keys, or there is
nothing to run concurrently. So they are sorted by position and never by key. A shuffle keeps no order by itself, hence
the sort behind it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from lanes.config import Keyless, Order
from lanes.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = [
    "BUCKETS",
    "CHECKED",
    "Effects",
    "Eras",
    "Plan",
    "check_conf",
    "check_eras",
    "era_column",
    "make_plan",
    "settings_of",
]

BUCKETS: Final = 65_536
"""Values of the column that a shuffle goes by."""

TASKS_PER_CORE: Final = 4
"""Tasks of a shuffle for each core: while one of them has a hot key, the others keep the cores busy."""

Effects = Literal["none", "fenced", "unfenced"]
"""What the handler does to the world outside: nothing, only under a fence by position (``Positions`` of
``lanes_postgres``), or more than that."""

Eras = Sequence[Mapping[int, int]]
"""How the number of partitions changed: for each time, by partition that was there before, the first position of the
new era. A partition that is not named was added then, and begins with it."""

_SORT: Final[tuple[str, ...]] = ("offset", "partition")
_SPREAD: Final = f"CAST(pmod(hash(partition, offset), {BUCKETS}) AS INT)"
_BY_KEY: Final = f"CAST(crc32(key) % {BUCKETS} AS INT)"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """``kind``: ``"aligned"`` = as read, one task a partition; ``"reshard"`` = a shuffle, then a sort; ``"as read"`` =
    no order is claimed. ``tasks``: of the shuffle, None = without. ``bucket``: the SQL expression that it goes by,
    modulo ``tasks``. ``sort``: the columns. ``why``: a sentence for each decision."""

    kind: Literal["aligned", "reshard", "as read"]
    tasks: int | None = None
    bucket: str | None = None
    sort: tuple[str, ...] = ()
    why: tuple[str, ...] = ()

    def __str__(self) -> str:
        steps = []
        if self.bucket is not None:
            steps.append(f"repartitionById({self.tasks}, {self.bucket})")
        if self.sort:
            steps.append(f"sortWithinPartitions({', '.join(self.sort)})")
        steps.append("mapInArrow(lanes)")
        return "\n".join([f"{self.kind}: {' -> '.join(steps)}", *(f"- {reason}" for reason in self.why)])


def make_plan(
    *,
    order: Order,
    keyless: Keyless,
    cores: int,
    partitions: int,
    aligned: bool = False,
    eras: Eras = (),
    tasks: int | None = None,
) -> Plan:
    """The plan for that order (see ``lanes.Settings``), on ``cores`` cores, of so many topic partitions.

    ``aligned``: each task of the source reads whole partitions, in order. ``tasks``: of a shuffle, None = by the cores.
    Raises ``ConfigError`` for an order that cannot be kept, naming the setting and the remedy.
    """
    if tasks is not None and (not isinstance(tasks, int) or isinstance(tasks, bool) or tasks < 1):
        raise ConfigError(f"tasks={tasks!r}: must be a whole number, 1 or more; None = {TASKS_PER_CORE} for each core")
    check_eras(eras)
    if order == "serial" and partitions > 1:
        raise ConfigError(
            f'order="serial" handles one partition, and {partitions} are selected: select one by partitions=…, or use '
            'order="partition"'
        )
    if aligned and not eras:
        if tasks is not None:
            raise ConfigError(
                f"tasks={tasks} with aligned=True: there is no shuffle to give tasks to; leave out tasks, or say "
                "aligned=False"
            )
        why = "aligned=True: one task reads a whole partition in order, so there is neither a shuffle nor a sort"
        return Plan(kind="aligned", why=(why,))
    if order == "none":
        why = 'order="none": rows are handled where they are read; the sort keeps no order of keys, but of what is read'
        return Plan(kind="as read", sort=_SORT, why=(why,))
    if aligned:
        raise ConfigError(
            "aligned=True with eras=…: a key moved between partitions, so no task reads all of it; say aligned=False"
        )
    return _reshard(order, keyless, cores, partitions, eras, tasks)


def _reshard(order: Order, keyless: Keyless, cores: int, partitions: int, eras: Eras, tasks: int | None) -> Plan:
    why = []
    wanted = tasks or TASKS_PER_CORE * max(1, cores)
    if order != "key":
        # More tasks than partitions would have nothing to do.
        wanted = min(wanted, max(1, partitions))
        bucket = "partition"
        why.append(f'order="{order}": all of a partition comes to one task, and its keys with it')
    else:
        keyed = _BY_KEY
        rest = "CAST(partition AS INT)" if keyless == "one_lane" else _SPREAD
        bucket = f"CASE WHEN key IS NULL THEN {rest} ELSE {keyed} END"
        why.append("all rows of a key come to one task, by the CRC-32 of the key, which Spark computes itself")
        why.append(
            'keyless="one_lane": rows without a key go by their partition, which is their lane'
            if keyless == "one_lane"
            else "rows without a key are spread by partition and position: no order is claimed of them"
        )
    why.append(
        f"{wanted} tasks: "
        + (
            f"tasks={tasks}"
            if tasks
            else f"{TASKS_PER_CORE} for each of {cores} cores, so that a hot key overlaps the rest"
        )
    )
    sort = _SORT
    if eras:
        sort = ("era", *sort)
        why.append(
            f"{len(eras) + 1} eras: positions of different numbers of partitions do not compare, so a task ends one "
            "era before it begins the next"
        )
    why.append(
        "sorted by position and not by key, so that keys run side by side; without a sort a shuffle has no order"
    )
    return Plan(kind="reshard", tasks=wanted, bucket=bucket, sort=sort, why=tuple(why))


def check_eras(eras: Eras) -> None:
    """Raise ``ConfigError`` for eras that do not follow each other."""
    before: Mapping[int, int] = {}
    for number, era in enumerate(eras):
        for partition, position in era.items():
            if not isinstance(partition, int) or not isinstance(position, int) or partition < 0 or position < 0:
                raise ConfigError(f"eras[{number}] has {partition!r}: {position!r}; give partition: first position")
        if missing := set(before) - set(era):
            raise ConfigError(f"eras[{number}] lacks partition {min(missing)} of the era before: partitions stay")
        if behind := [partition for partition, position in before.items() if era[partition] < position]:
            raise ConfigError(
                f"eras[{number}] begins before eras[{number - 1}] in partition {behind[0]}: put them in order"
            )
        before = era


def era_column(eras: Eras) -> str | None:
    """The SQL expression for the era of a row, 0 for the first; None where there is but one."""
    if not eras:
        return None
    begun = []
    for era in eras:
        cases = " ".join(f"WHEN {partition} THEN {position}" for partition, position in sorted(era.items()))
        begun.append(f"CAST(offset >= CASE partition {cases} ELSE 0 END AS INT)" if cases else "1")
    return " + ".join(begun)


_REFUSED: Final[Mapping[str, str]] = {
    "spark.sql.files.ignoreCorruptFiles": "what Spark then leaves out would be lost without a word",
    "spark.sql.files.ignoreMissingFiles": "what Spark then leaves out would be lost without a word",
    "spark.sql.parquet.binaryAsString": "keys and values would be taken as text, and those that are none not be found",
    "spark.sql.execution.arrow.useLargeVarTypes": "headers would come in types that no message has",
}
"""Settings that must not be true, and why."""

_ROWS: Final = "spark.sql.execution.arrow.maxRecordsPerBatch"

CHECKED: Final = ("spark.speculation", _ROWS, *_REFUSED)
"""The settings that ``check_conf`` looks at."""


def check_conf(conf: Mapping[str, str | None], effects: Effects) -> None:
    """Raise ``ConfigError`` for settings of Spark under which a promise cannot be kept. ``conf``: by their names."""

    def on(name: str) -> bool:
        return (conf.get(name) or "false").strip().lower() == "true"

    if effects not in ("none", "fenced", "unfenced"):
        raise ConfigError(f'effects={effects!r} is unknown: use "none", "fenced" or "unfenced"')
    if on("spark.speculation") and effects == "unfenced":
        raise ConfigError(
            'spark.speculation=true with effects="unfenced": Spark runs a slow task twice at once, and the loser goes '
            'on for seconds; set it to false, or fence the effects by position and say effects="fenced", or "none"'
        )
    rows = (conf.get(_ROWS) or "").strip()
    if rows.startswith("-") or rows == "0":
        raise ConfigError(
            f"{_ROWS}={rows}: without a limit Spark cannot plan the batches of a checkpoint, and what a worker has is "
            "bounded by bytes alone; set it to 1 or more"
        )
    for name, why in _REFUSED.items():
        if on(name):
            raise ConfigError(f"{name}=true: {why}; set it to false")


def settings_of(spark: SparkSession) -> dict[str, str | None]:
    """What ``check_conf`` looks at, of a session. Blocks."""
    found = {name: spark.conf.get(name, None) for name in CHECKED}
    try:
        context = spark.sparkContext.getConf()
    except Exception:
        # Spark Connect has no context; what its session says is all there is.
        return found
    # Tasks are scheduled by the settings of the context, whatever a session that was made later says of them.
    return {**found, "spark.speculation": context.get("spark.speculation", found["spark.speculation"])}
