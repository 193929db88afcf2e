"""The event loop in virtual time.

Reading order: ``event_loop``, ``tasks``, ``choosers``, ``guards``, ``watch``, ``places``, ``virtual``.
"""
