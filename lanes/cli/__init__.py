"""The command line ``lanes``. Needs the extra ``cli``.

Reading order: ``app``, ``cohort``, ``dead_letters``, ``doctor``, ``views``.
"""
