"""Reads one durable pull consumer as a source, or one for each partition of a queue.

Reading order: ``source``, ``consumer``, ``presence``, ``pulls``, ``takeover``, ``watch``, ``queue``.
"""
