"""Transactions that commit positions together with the outputs of their messages.

A transaction has the floor and the completed set of some partitions, and all outputs of the messages that both cover.
An output is therefore visible if, and only if, the stored position covers its message.

Reading order: ``coverage`` decides, ``waiting`` keeps the outputs, ``settings`` and ``requests`` are values,
``refusals`` has the texts of errors, ``performer`` is the thread that makes the transactions, and ``publisher``
connects them with the source.
"""
