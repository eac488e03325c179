"""Named values in a host memory budget, backed by a store: residency, prefetch and write-back."""
