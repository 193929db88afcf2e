"""Writes dead letters to a JetStream subject, and lists, republishes and deletes them.

Reading order: ``wire``, ``writer``, ``box``.
"""
