"""Tests of the log, of its subscriptions, and of ``PostgresSource``, on a real server."""
