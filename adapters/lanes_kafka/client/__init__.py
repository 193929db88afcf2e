"""The thread that owns a Kafka client, and all code that runs in this thread.

Reading order: ``thread``, ``mailbox``, ``group``, ``offsets``, ``topics``, ``intake``, ``records``, ``prefetch``,
``commits`` (a commit waits for its topic ids), ``lag``, ``key_watch``.
"""
