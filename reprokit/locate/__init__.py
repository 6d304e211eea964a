"""Finding where the first bad value of a step was born."""
