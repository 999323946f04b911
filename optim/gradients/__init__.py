"""Gradients made whole: averaged, summed, reduced while backward runs."""
