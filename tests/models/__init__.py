"""Tiny random models that the tests write for themselves."""
