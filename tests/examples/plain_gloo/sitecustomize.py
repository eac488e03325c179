"""On the way of the ranks that `doors` starts on the CPU: between them plain gloo, as
`tests/zero3/training.py` has it.

DeepSpeed's own op for ranks of one machine would be compiled for the better part of a minute first,
and spins.
"""

import functools
import os
import sys

# Not in the launchers, which do not need DeepSpeed, and not in the subprocess of py-cpuinfo, whose
# output DeepSpeed's would corrupt.
if "RANK" in os.environ and not any("cpuinfo" in word for word in sys.orig_argv):
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

    import cpuinfo

    # which DeepSpeed calls for each optimizer, and takes 1 s
    cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)

# Accelerate looks for GPUs before it takes FSDP; its code for FSDP2 runs without them.
if "RANK" in os.environ and os.environ.get("ACCELERATE_USE_FSDP") == "true":
    import accelerate.accelerator
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    made = accelerate.accelerator.AcceleratorState.__init__

    def make(self, *arguments, **named):
        made(self, *arguments, **named)
        self.distributed_type = DistributedType.FSDP
        self.fsdp_plugin = FullyShardedDataParallelPlugin()

    accelerate.accelerator.AcceleratorState.__init__ = make

# Without a GPU, Accelerate takes each of several ranks of DeepSpeed for the only one.
if "RANK" in os.environ and os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_CPU)
