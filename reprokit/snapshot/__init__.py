"""The snapshot file and what goes into it: format, environment, source, random state, and the redaction of all of these."""
