"""How state formats affect training: a character-level transformer trained in each format with
several seeds, and a stress test of the optimizer.
"""
