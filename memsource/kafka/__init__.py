"""A Kafka broker as data, and a source over one of its clients.

Reading order: ``broker``, ``coordinator``, ``client``, ``source``.
"""
