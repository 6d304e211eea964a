"""Going back: copies of the training state, playing noted steps again, finding the first bad one."""
