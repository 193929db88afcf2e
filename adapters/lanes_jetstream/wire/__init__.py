"""Requests, pulls and acknowledgements: what both kinds of sources send and receive.

Reading order: ``connection``, ``api_codes``, ``requests``, ``transport``, ``acks``, ``keys``, ``messages``,
``start``, ``stream_state``.
"""
