"""Audits journals on a cluster, with DataFrames.

Reading order: ``audit``, ``verdicts``, ``judge``; then the rows of a journal, ``rows`` and ``screen``; then the
promises, ``order``, ``owners`` and ``settling``.

The modules after ``verdicts`` import pyspark. The function ``audit`` imports these modules at its first call.
"""
