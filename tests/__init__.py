"""Tests, by what they exercise."""
