"""The sources that read one durable pull consumer, or one durable for each partition of a queue.

Reading order: ``source``, ``consumer``, ``presence``, ``pulls``, ``takeover``, ``watch``, ``queue``.
"""
