"""What keeping saved activations on a drive costs and saves, beside the other ways to train with
less memory.

python -m sweeps.activations /local_nvme --output reports/activations
"""
