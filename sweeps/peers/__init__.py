"""The libraries that `sweeps.compare` compares, one module for each: a class that moves the bytes of
a `Job` once and reports a `Measurement`.
"""
