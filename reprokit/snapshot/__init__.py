"""The snapshot file and what goes into it: environment, source, random state, and their redaction."""
