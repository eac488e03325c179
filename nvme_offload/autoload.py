"""The hook of `import torch` of editable installations that are older than this file.

Such an installation lists `install` in torch's entry-point group "torch.backends" until the package
is installed again, and `import torch` fails if the function is missing. The name may go once these
installations are gone.
"""


def install() -> None:
    """Leave everything as it is."""
