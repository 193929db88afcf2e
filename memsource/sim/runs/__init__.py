"""Runs, campaigns of runs, and their views.

Reading order: ``run``, ``campaign``, ``simulate``, ``view``, ``grid``, ``machine``.
"""
