"""The cost of `lanes`, measured beside a baseline in the same run; `python -m bench` runs it."""
