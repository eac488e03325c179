"""Moving bytes: the asynchronous engine, and the pinned memory that it reads into and
writes from.
"""
