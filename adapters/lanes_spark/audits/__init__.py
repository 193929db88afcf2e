"""The audit: journals judged by DataFrames.

Reading order: ``audit``, ``rows``, ``screen``, ``order``, ``owners``, ``settling``, ``verdicts``.
"""
