"""The broker in memory, its consumer group, and the sources over both.

Reading order: ``topic``, ``broker``, ``source``, ``group``, ``group_source``, ``calls``, ``turns``, ``watchers``,
``background``, ``dead_letters``, ``attempts``.
"""
