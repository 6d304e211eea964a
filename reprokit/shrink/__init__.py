"""Reducing a failing program to the smallest one that fails the same way."""
