"""Files that a crash leaves as they were or as they were to be, and JSON that tells when it was
altered.
"""
