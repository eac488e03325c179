"""The cost of planning on the shapes of real models: `python -m sweeps.planning`, from the root of
the repository. It uses neither drive nor GPU.

A swapper runs the uses of training steps over a store that moves no bytes, so the CPU time of its
calls is the cost of planning. The bytes it would move are compared with the minimum over all
choices of resident values, where a linear program for that is small enough.
"""
