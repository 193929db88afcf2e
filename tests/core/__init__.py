"""Tests of the pure core: no event loop, no clock, no broker."""
