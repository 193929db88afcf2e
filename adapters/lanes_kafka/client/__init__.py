"""The thread that owns a Kafka client, and everything that runs in it.

Reading order: ``thread``, ``mailbox``, ``group``, ``offsets``, ``topics``, ``intake``, ``records``, ``prefetch``,
``commits``, ``lag``, ``key_watch``.
"""
