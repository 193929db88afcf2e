"""One durable pull consumer as a source.

Reading order: ``source``, ``consumer``, ``fitting``, ``takeover``, ``watch``.
"""
