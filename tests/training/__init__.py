"""Tests of the training container."""
