"""The asynchronous I/O engine and the pinned memory pool."""
