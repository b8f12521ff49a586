"""Dialogues read and answered, many at once."""
