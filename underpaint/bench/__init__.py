"""Measurements, one module a question; each returns a report that prints as tables or JSON."""
