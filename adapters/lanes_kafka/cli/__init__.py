"""The Kafka commands of ``lanes``.

Reading order: ``commands``, ``config_file``, ``doctor``; ``queue``, ``queue_survey``.
"""
