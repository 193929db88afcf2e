"""Runs the thread that owns a Kafka client, and buffers the thread's messages on the event loop.

Reading order: ``thread``, ``mailbox``, ``prefetch`` (on the event loop), ``rebuilds``, ``group``,
``group_snapshot``, ``offsets``, ``topics``, ``intake``, ``read_rest``, ``records``, ``commits`` (a commit waits for its
topic ids), ``membership``, ``join_watch``, ``lag``, ``retention``, ``key_watch``, ``queue_watch``, ``growth``,
``last_callbacks``.
"""
