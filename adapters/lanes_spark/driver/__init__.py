"""The driver: replays and streams, batch by batch.

Reading order: ``replay``, ``stream``; their shared parts ``run``, ``selection``, ``scope``, ``batch`` and ``progress``;
then Spark's part of a checkpoint, ``query``, ``offset_server`` and ``results_folder``.
"""
