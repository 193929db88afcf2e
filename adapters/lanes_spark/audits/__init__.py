"""Audits: the rows of journals are judged by DataFrames, at the scale of a cluster.

Reading order: ``audit``, ``verdicts``, ``judge``; then the rows of a journal, ``rows`` and ``screen``; then the
promises, ``order``, ``owners`` and ``settling``.

Modules after ``verdicts`` import pyspark; ``audit`` imports them when it is called.
"""
