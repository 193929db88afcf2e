"""Observation of a run by its operators: status, health, metrics, spans and log lines.

Reading order: ``status`` (counts and positions), ``health`` (the reasons why a consumer is unhealthy), ``intake``
(partitions that deliver nothing although messages wait), ``retention`` (messages that the broker will soon delete),
``keyless`` (the warning about messages without keys), ``failures`` (the log lines about failed attempts), ``ownership``
(the log lines about partitions), ``cut_off`` (the log lines about handlers that a drain cancels), ``instruments``
(metrics), ``otel`` (spans), ``tap`` (reports of the runtime).
"""
