"""The tests, and the starter for the real components they (and `make run`) use."""
