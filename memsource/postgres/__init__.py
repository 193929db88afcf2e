"""PostgreSQL as data: the log with its sequencer, and a server with sessions, locks and rows, without I/O or a clock.

In the simulator ``lanes_postgres`` runs on this server. ``tests/simulated/postgres`` translates the statements of the
adapter. Reading order: ``log`` (positions after the commit), ``server`` (sessions, locks that end with them,
transactions), ``states`` (positions with epochs), ``pieces`` (ranges of slots with owners and drains).
"""
