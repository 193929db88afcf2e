"""Replays and streams: the batches that the driver runs.

Reading order: ``replay``, ``stream``, ``prepared``, ``query``, ``batch``, ``ranges``, ``selection``, ``live_ends``,
``results_folder``, ``progress``, ``meter``.
"""
