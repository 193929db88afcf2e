"""Tests of ring ranges over a log, on a real server."""
