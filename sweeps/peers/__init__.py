"""The engine against its peers: `python -m sweeps.peers DIR`, from the root of the repository.

Two sides move the same bytes in one run, interleaved (A B, then B A, and so on), since a drive's
speed drifts more within minutes than the sides differ. What counts is the median of the ratios of
each round. Everything that was measured is in the report's JSON.
"""
