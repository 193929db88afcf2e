"""The command line ``lanes``, which requires the extra ``cli``.

Reading order: ``misuse`` (an error), ``kit`` (tools of every command), ``group`` (groups and commands), ``app`` (the
console script), ``registered`` (the entry points), ``ring``, ``queue_names`` (options), ``route``, ``brokers`` (options
that reach a broker, and its client), ``queue``, ``dead_letters``, ``dead_letter_places`` (their options), ``origins``
(their selection), ``views`` (their texts), ``doctor`` (results of checks), ``run`` (a service of several processes).
"""
