"""Turning a reduction into what people read and run: the repro, the issue text, the report, a test."""

TEXTS = ("repro", "summary", "issue", "report", "test")
