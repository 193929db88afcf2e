"""Runs one task of Spark: a consumer that reads Arrow batches on its own event loop.

Reading order: ``job``, ``task``, ``source``, ``rows``, ``results``, ``journal``, ``progress``.
"""
