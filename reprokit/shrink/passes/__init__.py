"""Passes: plain functions that propose smaller candidates to a `Problem`. The contract of a pass:

* it takes a `Problem` and returns nothing; what it reached is in ``problem.best``;
* progress is decided deterministically: the same problem gets the same proposals in the same order;
* it never makes the candidate larger by `order.is_smaller`; ``consider`` sees to that;
* after a success it goes on from where it is, and never starts itself over (the schedule repeats passes);
* it proposes the extreme first, then less; runs are searched with adaptive steps (`find_integer` in `setting`), not one
  by one;
* whether a program is valid is found by running it: an invalid one is a check like any other.
"""
