"""Runs and campaigns of them, and what they show.

Reading order: ``run``, ``campaign``, ``simulate``, ``view``, ``story``, ``grid``, ``machine``.
"""
