"""The tables that a replay reads: topics, files, and selections by a journal.

Reading order: ``table``, ``kafka_topic``, ``watermarks``, ``journal_selection``, ``journal_positions``,
``journal_columns``, ``journal_files``.
"""
