"""Passes that are captured once and replayed: what graphs of any kind of pass need."""
