"""Named tensors in a budget of memory in front of a store: what stays, what is read ahead, what is
written.
"""
