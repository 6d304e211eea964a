"""Numbers of the steps of a run: the last of them, their course, events, and the story before a failure."""
