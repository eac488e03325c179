"""The field, side by side: `python -m sweeps.compare DIR`, from the root of the repository.

What this package does, and what else does it, is given the same bytes in interleaved runs, each in
a process of a worker of its own. A page, a table in Markdown and everything that was measured as
JSON come out.
"""
