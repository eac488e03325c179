"""What planning costs on the shapes of real models: `python -m sweeps.planning`, from the root of
the repository; neither drive nor GPU is touched.

A swapper is taken through the uses of training steps over a store that moves no byte, so that the
CPU time of its calls is what is left. What it moves is set against the least that any choice of
values to keep could move, where a linear program for that is small enough.
"""
