"""Histories and journals read back, and one order for all rows of all processes.

Reading order: ``rows``, ``reader``, ``journal``, ``timeline``.
"""
