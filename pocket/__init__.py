"""Pocket checkpoints: small trained models in the released layouts, with their data, training and judging."""
