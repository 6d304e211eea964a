"""Where candidates run, from cheap to certain:

* in this process: a candidate that cannot crash it, a millisecond each;
* a forked child per candidate (`processes`): crashes, hangs and floods of memory end with the child;
* a spawned worker (`worker`): the same where nothing can fork, as with CUDA; started again after a crash;
* any executor (`runner`): the same on the other side of it;
* a fresh interpreter for the last word: a worker that runs one candidate and ends.

`runner` decides which, and yields observations in the order of the candidates, however many run at once.
"""
