"""The command line ``lanes``. Needs the extra ``cli``.

Reading order: ``kit`` (tools of every command), ``app`` (the console script), ``registered`` (commands that are entry
points), ``ring``, ``dead_letters``, ``views`` (dead letters as text and JSON), ``doctor`` (results of a check).
"""
