"""The rewrites that the catalogue's fixes are made of: each turns a captured step into one that may not fail.

A rewrite does not claim to help; the edited step is run for that. It returns ``None`` where it does not apply, for
instance when the argument is a number and not a tensor.
"""
