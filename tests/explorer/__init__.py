"""The explorer of the real engine."""
