"""Runs replays and streams from Spark's driver, one batch after another.

Reading order: ``replay``, ``stream``; their shared parts ``run``, ``selection``, ``scope``, ``batch`` and ``progress``;
then Spark's part of a checkpoint, ``query``, ``offset_server`` and ``results_folder``.
"""
