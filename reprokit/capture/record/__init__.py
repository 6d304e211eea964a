"""Noting the calls of a training loop: entries, the tape, the running step and the past ones."""
