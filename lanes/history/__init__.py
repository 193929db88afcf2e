"""The records of a run: the history, which remains complete after a crash, and the journal for SQL and Spark.

Reading order: ``recorder`` (the rows of a history), ``writer`` (numbers and files), ``rules`` (settings in the first
row), ``journal`` (the same rows as Parquet files), ``buffer``, ``columns``, ``parquet``.

With a history, the consumer calls the handler of a message only after the history has written or dropped the
``started`` row.
"""
