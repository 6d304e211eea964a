"""The program of a training step: its form, which functions it may name, recording it and running it again."""
