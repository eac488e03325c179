"""The states of a value between memory and drive, and what leads from one to another: one table."""

from __future__ import annotations

from enum import IntEnum


class State(IntEnum):
    """Where the bytes of a value are. The newest are in memory from `CLEAN` on."""

    NOWHERE = 0  # to be created; no room
    OFFLOADED = 1  # on the drive, or on their way there from a room that was given away; no room
    RESERVED = 2  # has room, without bytes
    READING = 3  # has room, which a read fills, once it may
    CLEAN = 4  # in memory and on the drive
    DIRTY = 5  # in memory alone
    STUCK = 6  # in memory alone, because the last write failed
    WRITING = 7  # in memory, and being written
    REDIRTY = 8  # in memory alone, while an older version is being written
    USED = 9  # by its user, as on the drive
    USED_NEW = 10  # in memory alone
    USED_WRITING = 11  # while it is being written
    USED_OVER = 12  # in memory alone, while an older version is being written


class Event(IntEnum):
    """What happens to a value."""

    ROOM = 0  # it gets room
    READ = 1  # a read of it is started
    READ_WELL = 2
    LOST = 3  # its room is given to another, or its read has failed
    TAKE = 4  # its bytes are used
    CREATE = 5  # its room is used for new bytes
    SAME = 6  # its user is done, and has not changed it
    CHANGED = 7
    WRITE = 8  # a write of it is started
    WRITTEN = 9
    WRITE_FAILED = 10
    BACK = 11  # the room from which it is still being written is its own again


_ROWS: dict[State, dict[Event, State]] = {
    State.NOWHERE: {Event.ROOM: State.RESERVED},
    State.OFFLOADED: {
        Event.ROOM: State.RESERVED,
        Event.WRITTEN: State.OFFLOADED,
        Event.WRITE_FAILED: State.STUCK,
        Event.BACK: State.WRITING,
    },
    State.RESERVED: {
        Event.READ: State.READING,
        Event.CREATE: State.USED_NEW,
        Event.LOST: State.OFFLOADED,
        Event.WRITTEN: State.RESERVED,
    },
    State.READING: {
        Event.READ_WELL: State.CLEAN,
        Event.LOST: State.OFFLOADED,
        Event.WRITTEN: State.READING,
    },
    State.CLEAN: {
        Event.TAKE: State.USED,
        Event.CREATE: State.USED_NEW,
        Event.LOST: State.OFFLOADED,
    },
    State.DIRTY: {
        Event.TAKE: State.USED_NEW,
        Event.CREATE: State.USED_NEW,
        Event.WRITE: State.WRITING,
    },
    State.STUCK: {
        Event.TAKE: State.USED_NEW,
        Event.CREATE: State.USED_NEW,
        Event.WRITE: State.WRITING,
    },
    State.WRITING: {
        Event.TAKE: State.USED_WRITING,
        Event.CREATE: State.USED_OVER,
        Event.LOST: State.OFFLOADED,
        Event.WRITTEN: State.CLEAN,
        Event.WRITE_FAILED: State.STUCK,
    },
    State.REDIRTY: {
        Event.TAKE: State.USED_OVER,
        Event.CREATE: State.USED_OVER,
        Event.WRITTEN: State.DIRTY,
        Event.WRITE_FAILED: State.DIRTY,
    },
    State.USED: {Event.SAME: State.CLEAN, Event.CHANGED: State.DIRTY},
    State.USED_NEW: {Event.SAME: State.DIRTY, Event.CHANGED: State.DIRTY},
    State.USED_WRITING: {
        Event.SAME: State.WRITING,
        Event.CHANGED: State.REDIRTY,
        Event.WRITTEN: State.USED,
        Event.WRITE_FAILED: State.USED_NEW,
    },
    State.USED_OVER: {
        Event.SAME: State.REDIRTY,
        Event.CHANGED: State.REDIRTY,
        Event.WRITTEN: State.USED_NEW,
        Event.WRITE_FAILED: State.USED_NEW,
    },
}

# By state, then by event; None where the event cannot happen.
TABLE: list[list[State | None]] = [[_ROWS[state].get(event) for event in Event] for state in State]
