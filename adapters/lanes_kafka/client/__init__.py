"""The thread that owns a Kafka client, and everything that runs in it.

Reading order: ``thread``, ``mailbox``, ``requests``, ``group``, ``offsets``, ``topics``, ``intake``,
``records``, ``commits``, ``topic_id_check``, ``prefetch``, ``prefetched``, ``lag``, ``key_watch``, ``restarts``,
``leaving``.
"""
