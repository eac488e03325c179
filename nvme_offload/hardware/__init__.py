"""The hardware: drives, memory and GPUs of this machine, and the profiles that `nvme-sweep`
measured.
"""
