"""The Kafka commands of ``lanes``.

Reading order: ``commands``, ``config_file``, ``doctor``, ``queue_survey`` (for ``lanes queue``).
"""
