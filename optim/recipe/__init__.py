"""The whole recipe as one object."""
