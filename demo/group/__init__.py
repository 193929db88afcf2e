"""Several members at once: what is done to them, and what is found of it.

Reading order: ``members``, ``scenario``, ``feed``, ``findings``.
"""
