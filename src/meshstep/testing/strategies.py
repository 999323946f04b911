"""Hypothesis strategies for process layouts and what lies on them. Needs `pip install hypothesis`."""
