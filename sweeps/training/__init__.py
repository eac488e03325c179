"""Training steps with offload, in interleaved runs: `python -m sweeps.training DIR`, from the root
of the repository.

Each variant of a plan is a process of its own that trains a few steps; all of them in one run, A B
C, then C B A, and so on, since a drive's speed drifts more within minutes than variants differ.
Between any two of them fio says what the drive gives at the same setting, from which follows the
floor: the least time in which what a phase moved can be moved. What counts is the median of the
ratios of each round.
"""
