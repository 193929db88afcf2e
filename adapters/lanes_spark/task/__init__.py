"""One task of Spark: a consumer over Arrow batches, on its own event loop.

Reading order: ``job``, ``task``, ``source``, ``rows``, ``results``, ``journal``, ``progress``.
"""
