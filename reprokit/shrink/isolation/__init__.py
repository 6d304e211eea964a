"""Where candidates run, from cheap to certain:

* in this process: what is known not to crash, a millisecond each;
* a forked child per candidate (`forked`): crashes, hangs and floods of memory end with it;
* a spawned worker (`worker`, `serve`): the same where nothing can fork, as with CUDA; started again after a crash;
* any executor (`remote`): the same on the other side of it;
* a fresh interpreter for the last word: a worker that runs one candidate and ends.

`runner` decides which, and hands out observations in the order of the candidates, however many run at once.
"""
