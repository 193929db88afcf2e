"""Writes, reads and disposes of dead letters in a Kafka topic.

Reading order: ``wire``, ``producer``, ``writer``, ``log_reader``, ``box``.
"""
