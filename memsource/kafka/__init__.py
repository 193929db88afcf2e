"""A Kafka broker as data, and a source over one of its clients.

Reading order: ``broker``, ``log_sizes``, ``coordinator``, ``client``, ``source``, ``queue``.
"""
