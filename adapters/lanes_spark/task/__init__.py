"""One task of Spark: a consumer over Arrow batches, on an event loop of its own.

Reading order: ``job``, ``task``, ``source``, ``rows``, ``results``, ``journal``, ``progress``.
"""
