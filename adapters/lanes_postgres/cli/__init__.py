"""The command-line commands for PostgreSQL.

Reading order: ``doctor``, ``subscriptions``, ``retention``, ``commands``, ``ring``.
"""
