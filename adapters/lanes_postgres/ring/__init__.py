"""Stores the ranges of ring slots that the consumers of a group own.

Reading order: ``slots``, ``range_map`` (assignments), ``pieces`` (owners and positions), ``shared_calls``,
``reading``, ``unowned``, ``owners``, ``finished_attempts``.
"""
