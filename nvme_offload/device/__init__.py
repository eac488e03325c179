"""Values of a tier on the device that uses them. Copies to and from a GPU overlap with the GPU's
computation.
"""
