"""The communication of both kinds of sources with the server: requests, pulls, acknowledgements, messages.

Reading order: ``codes``, ``answers``, ``secure_client``, ``connection``, ``subjects``, ``transforms``, ``intake``,
``stream``, ``queue_subjects``, ``queue_watch``, ``retention``, ``subscription``, ``pull_requests``, ``turns``,
``keys``, ``messages``, ``acks``.
"""
