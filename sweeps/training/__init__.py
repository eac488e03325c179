"""Training steps with offload, in interleaved runs: `python -m sweeps.training DIR`, from the root
of the repository.

Each variant of a plan, with DeepSpeed ZeRO-3 or in plain PyTorch, is a separate process that trains
a few steps. The order is A B C, then C B A, since a drive's speed drifts more within minutes than
variants differ. Between any two, fio measures the drive at the same setting, which gives the floor,
the least time in which a phase's bytes can be moved. Ratios are medians of the ratios of each
round.
"""
