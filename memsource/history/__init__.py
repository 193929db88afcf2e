"""The reader of histories and journals, and one order for all their rows.

Reading order: ``rows``, ``reader``, ``journal``, ``timeline``.
"""
