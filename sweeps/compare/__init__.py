"""The engine compared with other libraries: `python -m sweeps.compare DIR`, from the root of the
repository.

Every library moves the same bytes in interleaved runs, each in its own worker process. The results
are a report in Markdown, and JSON.
"""
