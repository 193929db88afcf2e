"""The files in the folder of a journal: those that are whole, and how many are not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lanes.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, DataFrameReader, SparkSession

__all__ = ["read_journal", "unfinished_files"]


def unfinished_files(spark: SparkSession, paths: Sequence[str]) -> int:
    """How many files are being written there, or were when their process was killed. 0 where nobody can look: they are
    hidden, and Spark Connect lists none.

    Ask before ``read_journal``: a file that gets its name in between is counted then, and not overlooked.
    """
    jvm = getattr(spark, "_jvm", None)
    if jvm is None:
        return 0
    from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]

    found = 0
    for path in paths:
        pattern = jvm.org.apache.hadoop.fs.Path(f"{path.rstrip('/')}/.*.tmp")
        try:
            files = pattern.getFileSystem(spark.sparkContext._jsc.hadoopConfiguration()).globStatus(pattern)
        except Py4JJavaError:
            # Reading the folder comes next, and says what is wrong with it.
            continue
        found += 0 if files is None else len(files)
    return found


def read_journal(spark: SparkSession, paths: Sequence[str], unfinished: int) -> DataFrame:
    """The rows of the files that are whole, with whatever columns they have. Blocks while Spark lists the folders.

    ``unfinished``: as ``unfinished_files`` says. Raises ``ConfigError`` where there is no file that is whole, and where
    one was written by an earlier ``lanes``.
    """
    from pyspark.errors import AnalysisException

    reader = spark.read.option("pathGlobFilter", "*.parquet")
    try:
        table = reader.parquet(*paths)
    except AnalysisException as error:
        if error.getCondition() != "UNABLE_TO_INFER_SCHEMA":
            raise
        more = f", only {unfinished} that are not written to the end" if unfinished else ""
        raise ConfigError(
            f"journal {', '.join(paths)}: there is no file of a journal{more}; give the folder that "
            "lanes.run(journal=…) has written to, after its first file"
        ) from None
    kinds = dict(table.dtypes)
    if kinds.get("epoch") == "bigint" == kinds.get("assignment", "bigint"):
        _check_written(reader, paths, old="assignment" not in kinds)
    return table


def _check_written(reader: DataFrameReader, paths: Sequence[str], *, old: bool) -> None:
    """Raise ``ConfigError`` where rows count assignments in the column that has the epoch now, as an earlier ``lanes``
    wrote them. ``old``: the table is without the column that they are counted in.

    Spark takes the columns of one of the files for those of all, and fills up what another one lacks: so both are named
    here. Of most parts of a journal the statistics say that there is no epoch, and they are not read.
    """
    from pyspark.sql import functions as F  # noqa: N812

    rows = reader.schema("epoch bigint, assignment bigint").parquet(*paths)
    earlier = rows.where(F.col("epoch").isNotNull() & F.col("assignment").isNull())
    found = earlier.select(F.col("_metadata.file_path")).first()
    if found is not None or old:
        raise ConfigError(
            f"journal {', '.join(paths)}: {found[0] if found else 'a file'} was written by an earlier lanes, which "
            "cannot be judged: take the files of its run out, or give only those of this version"
        )
