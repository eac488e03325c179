"""Values of a tier on the device where they are used: copies to and from a GPU that overlap with its
computation.
"""
