"""Measurements of the cost of `lanes` and of baselines; `python -m bench` runs the measurements."""
