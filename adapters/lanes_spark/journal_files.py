"""The files in the folder of a journal: those that are whole, and how many are not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lanes.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

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

    ``unfinished``: as ``unfinished_files`` says. Raises ``ConfigError`` where there is no file that is whole.
    """
    from pyspark.errors import AnalysisException

    try:
        return spark.read.option("pathGlobFilter", "*.parquet").parquet(*paths)
    except AnalysisException as error:
        if error.getCondition() != "UNABLE_TO_INFER_SCHEMA":
            raise
        more = f", only {unfinished} that are not written to the end" if unfinished else ""
        raise ConfigError(
            f"journal {', '.join(paths)}: there is no file of a journal{more}; give the folder that "
            "lanes.run(journal=…) has written to, after its first file"
        ) from None
