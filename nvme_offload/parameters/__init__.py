"""Parameters that stream: each is on the device from shortly before its use to the end of it, and in
host memory or on the drives otherwise.
"""
