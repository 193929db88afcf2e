"""Brokers in memory, and sources over them, for tests without a server.

Reading order: ``watchers``, ``topic``, ``broker``, ``group``, ``scripted``, ``source``, ``publisher``,
``group_source``, ``remote``, ``attempts``, ``states``, ``locks``, ``stranded_looks``.
"""
