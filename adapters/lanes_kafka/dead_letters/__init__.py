"""Dead letters in a Kafka topic: code that writes, reads and disposes of them.

Reading order: ``wire``, ``producer``, ``writer``, ``log_reader``, ``box``.
"""
