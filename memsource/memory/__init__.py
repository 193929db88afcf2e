"""Brokers in memory, and sources over them, for tests without a server.

Reading order: ``topic``, ``watchers``, ``broker``, ``group``, ``scripted``, ``source``, ``group_source``, ``attempts``.
"""
