"""Gradient reduction: buckets, communication hooks, and reduction during backward."""
