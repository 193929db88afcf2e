"""The commands of PostgreSQL.

Reading order: ``doctor``, ``subscriptions``, ``retention``, ``commands``, ``ring``.
"""
