"""The readers of histories and journals, and one order for all rows of all processes.

Reading order: ``rows``, ``reader``, ``journal``, ``outputs``, ``timeline``.
"""
