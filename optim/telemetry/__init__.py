"""Measurement of a training run every few steps, and reports of the results to files, dashboards and the terminal."""
