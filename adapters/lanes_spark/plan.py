"""Plans how rows reach the tasks of Spark, and gives the reasons. Only ``settings_of`` calls Spark.

Unless the order is ``"none"``, all rows of a key must reach one task, in the order of their positions. Handlers run
concurrently only if rows of different keys alternate. The plan therefore sorts rows by position, and never by key. Each
task sorts its rows after the shuffle, because a shuffle keeps no order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from lanes.arguments import but_not, shown_value
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
"""Number of values of the column by which a shuffle distributes rows."""

TASKS_PER_CORE: Final = 4
"""Number of shuffle tasks for each core. While one task handles a hot key, the other tasks use the cores."""

Effects = Literal["none", "fenced", "unfenced"]
"""Effects of the handler outside its process.

``"none"``: the handler has no effects. ``"fenced"``: a stored position prevents a repeated effect, see ``Positions`` of
``lanes_postgres``. ``"unfenced"``: a repeated task repeats its effects."""

Eras = Sequence[Mapping[int, int]]
"""Changes of the number of partitions, in order. Each change begins a new era. A change maps each earlier partition to
its first position in the new era. If a change does not name a partition, this change or a later change added the
partition."""

_SORT: Final[tuple[str, ...]] = ("offset", "partition")
_SPREAD: Final = f"CAST(pmod(hash(partition, offset), {BUCKETS}) AS INT)"
_BY_KEY: Final = f"CAST(crc32(key) % {BUCKETS} AS INT)"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The plan that distributes rows to the tasks of Spark.

    Attributes:
        kind: ``"aligned"``: one task reads a whole partition. ``"reshard"``: Spark shuffles and then sorts the rows.
            ``"as read"``: the plan keeps no order.
        tasks: Number of shuffle tasks; None = no shuffle.
        bucket: SQL expression by which the shuffle distributes rows, modulo ``tasks``; None = no shuffle.
        sort: Columns by which Spark sorts the rows of each task.
        why: Reasons for the decisions, one text each.
    """

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
    """Choose the plan that distributes rows to the tasks.

    Args:
        order: Order of the handler, see ``lanes.Settings``.
        keyless: Order of messages without a key, see ``lanes.Settings``.
        cores: Cores of the cluster.
        partitions: Number of selected topic partitions.
        aligned: Whether each task of the source reads whole partitions, in order.
        eras: Changes of the number of partitions, see ``Eras``.
        tasks: Number of shuffle tasks, 1 or more. If ``order`` is ``"partition"`` or ``"serial"``, the plan reduces the
            number to ``partitions``. Default: 4 per core.

    Returns:
        The plan, with its reasons.

    Raises:
        ConfigError: An argument is invalid, the arguments exclude each other, or the source cannot provide the order.
    """
    if tasks is not None and (not isinstance(tasks, int) or isinstance(tasks, bool) or tasks < 1):
        raise ConfigError(
            f"tasks={shown_value(tasks)}: must be a whole number, 1 or more{but_not(tasks)}; None = {TASKS_PER_CORE} "
            "for each core"
        )
    check_eras(eras)
    if order == "serial" and partitions > 1:
        raise ConfigError(
            f'order="serial" handles one partition, and {partitions} partitions are selected: select one partition by '
            'partitions=…, or use order="partition"'
        )
    if aligned and not eras:
        if tasks is not None:
            raise ConfigError(
                f"tasks={tasks} with aligned=True: the plan has no shuffle whose tasks could be counted; leave out "
                "tasks, or set aligned=False"
            )
        why = "aligned=True: one task reads a whole partition in order, so the plan needs neither a shuffle nor a sort"
        return Plan(kind="aligned", why=(why,))
    if order == "none":
        why = 'order="none": the task that reads a row handles the row; the sort orders only the rows of each task'
        return Plan(kind="as read", sort=_SORT, why=(why,))
    if aligned:
        raise ConfigError(
            "aligned=True with eras=…: keys have moved between partitions, so no task reads all rows of a key; set "
            "aligned=False"
        )
    return _reshard(order, keyless, cores, partitions, eras, tasks)


def _reshard(order: Order, keyless: Keyless, cores: int, partitions: int, eras: Eras, tasks: int | None) -> Plan:
    why = []
    wanted = tasks or TASKS_PER_CORE * max(1, cores)
    number = f"{TASKS_PER_CORE} for each of {cores} cores, so that the task of a hot key does not idle cores"
    if tasks:
        number = f"tasks={tasks}"
    if order != "key":
        if wanted > max(1, partitions):
            wanted = max(1, partitions)
            number = "the number of selected partitions, because further tasks would get no rows"
        bucket = "partition"
        why.append(f'order="{order}": one task gets all rows of a partition, and therefore of its keys')
    else:
        keyless_bucket = "CAST(partition AS INT)" if keyless == "one_lane" else _SPREAD
        bucket = f"CASE WHEN key IS NULL THEN {keyless_bucket} ELSE {_BY_KEY} END"
        why.append("one task gets all rows of a key, by the CRC-32 of the key, which Spark computes itself")
        why.append(
            'keyless="one_lane": rows without a key are distributed by their partition, which is their lane'
            if keyless == "one_lane"
            else "rows without a key are distributed by partition and position, and have no order"
        )
    why.append(f"{wanted} tasks: {number}")
    sort = _SORT
    if eras:
        sort = ("era", *sort)
        why.append(
            f"{len(eras) + 1} eras: positions of two eras cannot be compared, so a task ends an era before it begins "
            "the next era"
        )
    why.append(
        "a shuffle keeps no order, so the rows are sorted by position, and not by key, so that keys run concurrently"
    )
    return Plan(kind="reshard", tasks=wanted, bucket=bucket, sort=sort, why=tuple(why))


def check_eras(eras: Eras) -> None:
    """Raise ``ConfigError`` for malformed eras, or for eras that are not in order."""
    before: Mapping[int, int] = {}
    for number, era in enumerate(eras):
        for partition, position in era.items():
            if not isinstance(partition, int) or not isinstance(position, int) or partition < 0 or position < 0:
                raise ConfigError(
                    f"eras[{number}] has {partition!r}: {position!r}; write partition: first position, both 0 or more"
                )
        if missing := set(before) - set(era):
            raise ConfigError(
                f"eras[{number}] lacks partition {min(missing)} of eras[{number - 1}]: a topic keeps its partitions; "
                "add the first position of that partition"
            )
        if behind := [partition for partition, position in before.items() if era[partition] < position]:
            raise ConfigError(
                f"eras[{number}] begins before eras[{number - 1}] in partition {behind[0]}: put the eras in order"
            )
        before = era


def era_column(eras: Eras) -> str | None:
    """Return the SQL expression for the era of a row, 0 for the first era; None = no ``eras``."""
    if not eras:
        return None
    begun = []
    for era in eras:
        cases = " ".join(f"WHEN {partition} THEN {position}" for partition, position in sorted(era.items()))
        begun.append(f"CAST(offset >= CASE partition {cases} ELSE 0 END AS INT)" if cases else "1")
    return " + ".join(begun)


_REFUSED: Final[Mapping[str, str]] = {
    "spark.sql.files.ignoreCorruptFiles": "Spark would skip rows without an error",
    "spark.sql.files.ignoreMissingFiles": "Spark would skip rows without an error",
    "spark.sql.parquet.binaryAsString": "Spark would read keys and values as text, and change bytes that are not text",
    "spark.sql.execution.arrow.useLargeVarTypes": "headers would have types that a message cannot have",
}
"""Settings of Spark that must not be true, each with the reason."""

_ROWS: Final = "spark.sql.execution.arrow.maxRecordsPerBatch"

CHECKED: Final = ("spark.speculation", _ROWS, *_REFUSED)
"""Settings that ``check_conf`` checks."""


def check_conf(conf: Mapping[str, str | None], effects: Effects) -> None:
    """Raise ``ConfigError`` for unknown ``effects``, and for a setting of Spark that contradicts a promise."""

    def on(name: str) -> bool:
        return (conf.get(name) or "false").strip().lower() == "true"

    if effects not in ("none", "fenced", "unfenced"):
        raise ConfigError(f'effects={effects!r} is unknown: use "none", "fenced" or "unfenced"')
    if on("spark.speculation") and effects == "unfenced":
        raise ConfigError(
            'spark.speculation=true with effects="unfenced": Spark runs a second attempt of a slow task, and the '
            "losing attempt continues for seconds. Set spark.speculation to false, or fence the effects by position "
            'and set effects="fenced"; for a handler without effects set effects="none"'
        )
    rows = (conf.get(_ROWS) or "").strip()
    if rows.startswith("-") or rows == "0":
        raise ConfigError(
            f"{_ROWS}={rows}: without a limit Spark cannot plan the batches of a checkpoint, and only bytes bound the "
            f"rows of a worker; set {_ROWS} to 1 or more"
        )
    for name, why in _REFUSED.items():
        if on(name):
            raise ConfigError(f"{name}=true: {why}; set {name} to false")


def settings_of(spark: SparkSession) -> dict[str, str | None]:
    """Return the session settings that ``check_conf`` checks. Blocks."""
    found = {name: spark.conf.get(name, None) for name in CHECKED}
    try:
        context = spark.sparkContext.getConf()
    except Exception:
        # Spark Connect has a session, but no context.
        return found
    # Read the settings of the context, because Spark schedules tasks by them and ignores later settings of the session.
    return {**found, "spark.speculation": context.get("spark.speculation", found["spark.speculation"])}
