"""What a run tells its operators: status, health, metrics and spans.

Reading order: ``status``, ``health``, ``instruments``, ``otel``, ``tap``.
"""
