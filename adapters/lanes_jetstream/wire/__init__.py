"""Talks to the server for both kinds of sources: requests, pulls, acknowledgements, messages.

Reading order: ``connection``, ``codes``, ``stream``, ``pull_requests``, ``keys``, ``transforms``,
``messages``, ``acks``.
"""
