"""`nvme-sweep`: finds block size, queue depth and thread count for a drive, and says how sure it
is.
"""
