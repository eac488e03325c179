"""What the state formats do to training: a character-level transformer with each of them, several
seeds, and gradients that misbehave.
"""
