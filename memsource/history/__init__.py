"""Histories and journals read back, and put into one order.

Reading order: ``rows``, ``reader``, ``journal``, ``timeline``.
"""
