"""The command line ``lanes``. Needs the extra ``cli``.

Reading order: ``kit`` (tools of every command), ``app`` (the console script), ``registered`` (the entry points),
``ring``, ``dead_letters``, ``views`` (their texts), ``doctor`` (results of checks).
"""
