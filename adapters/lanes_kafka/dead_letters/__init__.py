"""Dead letters in a Kafka topic: written, read back, disposed of.

Reading order: ``wire``, ``producer``, ``writer``, ``log_reader``, ``box``.
"""
