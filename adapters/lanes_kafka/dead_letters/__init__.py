"""Dead letters in a Kafka topic: written, read back, disposed of.

Reading order: ``wire``, ``writer``, ``log_reader``, ``box``.
"""
