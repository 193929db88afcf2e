"""Tests of transactions that commit outputs together with positions."""
