"""State of one watched run: its steps, counts, numbers, grad scalers, cost and processes."""
