"""The workers of a run: they call the handler and report its outcome.

Reading order: ``context``, ``outcomes``, ``endings``, ``tasks``, ``pool``, ``threads``, ``batches``,
``batch_threads``, ``workforce``.
"""
