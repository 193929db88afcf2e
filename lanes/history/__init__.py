"""The records of a run: the history, which survives a crash, and the journal for SQL and Spark.

Reading order: ``recorder`` (the rows of a history), ``writer`` (numbers and files), ``rules`` (settings in the first
row), ``journal`` (the same rows as Parquet files), ``buffer``, ``columns``, ``parquet``.

With a history, a handler of one message is called only after the ``started`` row of its message is in the file or was
given up.
"""
