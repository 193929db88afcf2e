"""Talks to the server for both kinds of sources: requests, pull requests, acknowledgements, messages.

Reading order: ``codes``, ``answers``, ``secure_client``, ``connection``, ``subjects``, ``transforms``, ``intake``,
``stream``, ``queue_subjects``, ``queue_watch``, ``retention``, ``subscription``, ``pull_requests``, ``turns``,
``keys``, ``messages``, ``acks``, ``confirmations``.
"""
