"""Reads one durable pull consumer as a source.

Reading order: ``source``, ``consumer``, ``pulls``, ``takeover``, ``watch``.
"""
