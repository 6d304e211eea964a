"""Hooks into a live loop: following its steps, checking them, saving the first one that failed."""
