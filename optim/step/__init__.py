"""Accumulation windows, step checks, and the update engines."""
