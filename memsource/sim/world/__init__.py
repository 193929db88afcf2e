"""The world of a run: a broker, workers with the user's handler, and planned faults.

Reading order: ``world``, ``worker``, ``injection``, ``progress``, ``state``.
"""
