"""The Spark commands of ``lanes``.

Reading order: ``commands``, ``options``, ``output``; then ``doctor`` and ``machine``.
"""
