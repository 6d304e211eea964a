"""Where candidates run:

* in this process: a candidate that cannot crash it, a millisecond each;
* in a child (`apart`): forked for each candidate, or spawned where nothing can fork, as with CUDA;
* through an executor (`runner`): in a child on the other side of it.

`runner` decides which, and yields observations in the order of the candidates, however many run at once.
"""
