"""Cost and savings of activations saved on a drive, compared with other ways to train with less
memory.

python -m sweeps.activations /local_nvme --output reports/activations
"""
