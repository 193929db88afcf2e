"""Several members at once: their faults, and the findings about the faults.

Reading order: ``members``, ``scenario``, ``feed``, ``findings``.
"""
