"""Frames: the tensors of single module calls, measured in chosen steps of a running script."""
