"""The event loop in virtual time.

Reading order: ``event_loop``, ``tasks``, ``timers``, ``choosers``, ``guards``, ``watch``, ``places``, ``virtual``,
``waiting``.
"""
