"""The command `nvme-offload`: what to know before a training starts."""
