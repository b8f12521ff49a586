"""Schedules and guidance, independent of the model."""
