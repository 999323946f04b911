"""Clipping rules, and their application to measured gradients."""
