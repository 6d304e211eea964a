"""Watching a live training loop and saving its first failing step."""
