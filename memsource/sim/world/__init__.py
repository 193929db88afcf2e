"""The world of a run: a broker, workers around the user's handler, and their faults.

Reading order: ``world``, ``worker``, ``injection``, ``progress``, ``state``.
"""
