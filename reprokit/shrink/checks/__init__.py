"""Checks: what counts as the bug. Every check is a `reprokit.shrink.checks.check.Check`.

A check observes one run of a candidate (plain data that can cross a process boundary) and judges the observation. Every
check has the same two guards against slipping: nothing that a candidate is given may be bad in a way that the snapshot
was not given, and a crash is never the bug.
"""
