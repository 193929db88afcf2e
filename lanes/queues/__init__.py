"""Queues that consist of several physical queues.

Reading order: ``partitioned`` (names and routes), ``registered`` (the physical queues that a source reads),
``stranded`` (messages that no consumer reads), ``widths`` (the runbook of another number of partitions). The hash of
the routes is ``lanes.core.queue_hash``.
"""
