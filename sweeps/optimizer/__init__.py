"""Steps of `NVMeOptimizer` over synthetic gradients, in interleaved runs: `python -m
sweeps.optimizer DIR`, from the root of the repository.

Each state format, DeepSpeed's NVMe optimizer if wanted, and the same optimizer in memory are
processes that make a few steps over the parameters of a GPT, or of a model by name; all of them in
one run, A B C, then C B A. Between any two fio says what the drive gives at the same setting, from
which follows the floor of each step.
"""
