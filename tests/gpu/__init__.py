"""Checks that need a GPU."""
