"""What `lanes` costs, measured beside a baseline in the same run. `python -m bench` runs it; see `bench.__main__`."""
