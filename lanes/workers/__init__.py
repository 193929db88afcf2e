"""The workers of a run: they call the handler and report its outcome.

Reading order: ``context``, ``outcomes``, ``tasks``, ``pool``, ``threads``, ``batches``, ``loop_watch``.
"""
