"""The sources of a replay, Kafka topics and Parquet tables, and the selection of their positions by a journal.

Reading order: ``table``, ``kafka_topic``, ``journal_selection``, ``journal``.
"""
