"""Reads one durable pull consumer as a source.

Reading order: ``source``, ``consumer``, ``presence``, ``pulls``, ``takeover``, ``watch``.
"""
