"""Stores a log in PostgreSQL: messages in partitions, with positions in the order of their commits.

Reading order: ``appending`` (a log and its messages), ``over`` (a table of the user), ``trigger`` (its check),
``sequencer`` (positions), ``reading`` (messages by position).
"""
