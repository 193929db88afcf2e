"""The source of ``lanes`` that reads a log as a named subscription. Needs asyncio.

Reading order: ``connections``, ``starts`` (first positions), ``visits`` (decisions), ``members`` (heartbeats),
``owned`` (one ownership), ``kept`` (an alarm), ``visitor`` (the task that acquires partitions and reads messages),
``owned_piece`` and ``piece_visitor`` (the same with ranges), ``source``.
"""
