"""Dead letters in a JetStream subject: written, read back, disposed of.

Reading order: ``wire``, ``writer``, ``box``.
"""
