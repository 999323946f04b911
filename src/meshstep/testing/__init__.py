"""Tests of parallel models: functions on several ranks, exactness against a dense model, random layouts."""

__all__: list[str] = []
