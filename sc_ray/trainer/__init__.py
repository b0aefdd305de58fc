"""Turns rows into better weights."""
