"""The thread that owns a Kafka client, and all code that runs in this thread.

Reading order: ``thread``, ``mailbox``, ``rebuilds``, ``group``, ``offsets``, ``topics``, ``intake``, ``records``,
``prefetch``, ``commits`` (a commit waits for its topic ids), ``membership``, ``join_watch``, ``outage_watch``, ``lag``,
``retention``, ``key_watch``, ``queue_watch``, ``growth``.
"""
