"""A run with several members: the scenario with its faults, and the figures from the histories.

Reading order: ``members``, ``scenario``, ``feed``, ``findings``.
"""
