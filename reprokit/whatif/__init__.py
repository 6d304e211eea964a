"""What if: the same program in other precisions, on the other device, compiled, with one thread, in anomaly mode.

`trial` lists the variants and runs a program in one of them, `table` runs all of them apart from this process and
within a budget of time. The result is plain data that a reduction keeps and `render.whatif` shows.
"""
