"""The workers of a run, which call the handler and report its outcome.

Reading order: ``context``, ``outputs``, ``outcomes``, ``wake_limit``, ``tasks``, ``pool``, ``threads``, ``crossing``,
``processes``, ``child``, ``batches``, ``loop_watch``, ``freezes``, ``overtime``.
"""
