"""PostgreSQL as data: the log with its sequencer, and a server with sessions, locks and rows, without I/O or a clock.

``lanes_postgres`` runs on it in the simulator; ``tests/simulated/postgres`` translates the statements of the adapter.
Reading order: ``log`` (positions after the commit), ``server`` (sessions, locks that end with them,
transactions), ``states`` (positions with epochs).
"""
