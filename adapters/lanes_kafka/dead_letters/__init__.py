"""Dead letters in a Kafka topic: the code that writes, reads and disposes of dead letters.

Reading order: ``wire``, ``producer``, ``writer``, ``log_reader``, ``box``.
"""
