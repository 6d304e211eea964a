"""What is known to make a training step go wrong: one table of rules, matching them, and trying their fixes."""
