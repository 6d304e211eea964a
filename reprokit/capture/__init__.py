"""Watching a live training loop and saving its first failing step. Importing this package does not import torch."""
