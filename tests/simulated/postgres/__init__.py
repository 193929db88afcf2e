"""``lanes_postgres`` in the simulator: the real adapter over simulated connections to a server as data.

The server has no I/O and no clock: ``log`` (positions after the commit), ``server`` (sessions, locks that end with
them, transactions), ``states`` (positions with epochs), ``pieces`` (ranges of slots with owners and drains).
``statements`` translates the statements of the adapter.

Reading order: ``log``, ``server``, ``states``, ``pieces``, ``statements``, ``client``, ``seams``, ``member``,
``broker``, ``ranged``, ``adapter``, ``scripts``.
"""
