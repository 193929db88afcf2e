"""One task of Spark: a consumer over Arrow batches, on an event loop of its own.

Reading order: ``task``, ``job``, ``source``, ``rows``, ``results``, ``journal``, ``progress``, ``loop_watch``,
``collector``.
"""
