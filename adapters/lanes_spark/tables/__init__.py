"""Sources of a replay: topics, files, and positions that a journal selects.

Reading order: ``table``, ``kafka_topic``, ``journal_selection``, ``journal``.
"""
