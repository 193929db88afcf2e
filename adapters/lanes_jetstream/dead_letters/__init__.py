"""Writes dead letters to a JetStream subject, and lists, republishes and deletes dead letters.

Reading order: ``wire``, ``writer``, ``box``.
"""
