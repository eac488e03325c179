"""`Progress`: how far a call has come. If an exception ends it, the next call sees where."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class Progress:
    """The progress of the calls in one thread. An exception leaves it unchanged.

    Attributes
    ----------
    running : bool
        A call has begun and has not returned: values may be in use.
    changing : bool
        Parameters or states are being changed, and the change is not recorded yet: a second attempt
        would not give the same bits.
    """

    running: bool = False
    changing: bool = False

    def begin_change(self) -> None:
        """Parameters or states change from here on."""
        self.changing = True
