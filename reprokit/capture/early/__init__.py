"""Early warning: events that say a run has left its own course, and where that began. Off unless asked for."""
