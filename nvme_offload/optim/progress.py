"""`Progress`: how far a call has come, for the next one to see where an exception has ended it."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class Progress:
    """The progress of the calls in one thread. An exception leaves it as it was then.

    Attributes
    ----------
    running : bool
        A call has begun and has not returned: values may be in use.
    changing : bool
        Parameters or states are being changed, and no record says yet that they are: a second try
        would not give the same bits.
    """

    running: bool = False
    changing: bool = False

    def begin_change(self) -> None:
        """Parameters or states change from here on."""
        self.changing = True
