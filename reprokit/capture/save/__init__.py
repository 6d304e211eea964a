"""Saving a step: choosing it, replaying it under the tracer, writing and checking the file."""
