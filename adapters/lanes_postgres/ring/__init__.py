"""Ranges of ring slots that the consumers of a group own.

Reading order: ``range_map``.
"""
