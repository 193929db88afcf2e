"""The commands of PostgreSQL.

Reading order: ``doctor``, ``commands``.
"""
