"""Steps of `NVMeOptimizer` over synthetic gradients, in interleaved runs: `python -m
sweeps.optimizer DIR`, from the root of the repository.

Each state format, DeepSpeed's NVMe optimizer if requested, and the same optimizer in memory are
separate processes that make a few steps over the parameters of a GPT or of a named model, in the
order A B C, then C B A. Between any two, fio measures the drive at the same setting, which gives
the floor of each step.
"""
