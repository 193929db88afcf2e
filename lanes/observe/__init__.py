"""Observation of a run by its operators: status, health, metrics, spans and log lines.

Reading order: ``status`` (counts and positions), ``health`` (the reasons why a consumer is unhealthy), ``failures``
(the log lines about failed attempts), ``ownership`` (the log lines about partitions), ``instruments`` (metrics),
``otel`` (spans), ``tap`` (reports of the runtime).
"""
