"""What the machine has: drives, memory and GPUs, and what `nvme-sweep` has measured of its
drives.
"""
