"""The records of a run: the history, which survives a crash, and the journal for SQL and Spark.

Reading order: ``recorder``, ``writer``, ``segment``, ``rules``, ``journal``, ``buffer``, ``columns``, ``parquet``.
"""
