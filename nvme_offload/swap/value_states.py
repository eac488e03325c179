"""The states of a value between memory and drive, and one table of their transitions."""

from __future__ import annotations

from enum import IntEnum


class State(IntEnum):
    """Where the bytes of a value are. From `CLEAN` on, memory has the newest version."""

    NEW = 0  # not created yet; no block
    # no block; on the drive, or being written from a block that another value may get
    OFFLOADED = 1
    RESERVED = 2  # has a block, without contents
    READING = 3  # has a block; a read fills it, or is waiting to start
    CLEAN = 4  # in memory and on the drive
    DIRTY = 5  # in memory only
    DIRTY_FAILED = 6  # in memory only: the last write failed
    WRITING = 7  # in memory, being written
    REDIRTY = 8  # in memory only, while an older version is being written
    USED = 9  # in use; on the drive too
    USED_DIRTY = 10  # in use; in memory only
    USED_WRITING = 11  # in use, while it is being written
    USED_REDIRTY = 12  # in use; in memory only, while an older version is being written


class Event(IntEnum):
    """An event in the life of a value."""

    ALLOCATE = 0  # it gets a block
    START_READ = 1
    READ_DONE = 2
    DROP = 3  # its block goes to another value, or its read failed
    USE = 4  # its user gets its contents
    CREATE = 5  # its user gets the block for new contents
    RELEASE_CLEAN = 6  # its user has finished and has not changed it
    RELEASE_DIRTY = 7
    START_WRITE = 8
    WRITE_DONE = 9
    WRITE_FAILED = 10
    REATTACH = 11  # it gets back the block from which it is still being written
    ROLL_BACK = 12  # the copy in memory becomes invalid: the drive has an older version again
    SPARE = 13  # the copy on the drive becomes invalid: other values need the space


_ROWS: dict[State, dict[Event, State]] = {
    State.NEW: {Event.ALLOCATE: State.RESERVED},
    State.OFFLOADED: {
        Event.ALLOCATE: State.RESERVED,
        Event.WRITE_DONE: State.OFFLOADED,
        Event.WRITE_FAILED: State.DIRTY_FAILED,
        Event.REATTACH: State.WRITING,
        Event.ROLL_BACK: State.OFFLOADED,
    },
    State.RESERVED: {
        Event.START_READ: State.READING,
        Event.CREATE: State.USED_DIRTY,
        Event.DROP: State.OFFLOADED,
        Event.WRITE_DONE: State.RESERVED,
    },
    State.READING: {
        Event.READ_DONE: State.CLEAN,
        Event.DROP: State.OFFLOADED,
        Event.WRITE_DONE: State.READING,
    },
    State.CLEAN: {
        Event.USE: State.USED,
        Event.CREATE: State.USED_DIRTY,
        Event.DROP: State.OFFLOADED,
        Event.ROLL_BACK: State.OFFLOADED,
        Event.SPARE: State.DIRTY,
    },
    State.DIRTY: {
        Event.USE: State.USED_DIRTY,
        Event.CREATE: State.USED_DIRTY,
        Event.START_WRITE: State.WRITING,
        Event.ROLL_BACK: State.OFFLOADED,
        Event.SPARE: State.DIRTY,
    },
    State.DIRTY_FAILED: {
        Event.USE: State.USED_DIRTY,
        Event.CREATE: State.USED_DIRTY,
        Event.START_WRITE: State.WRITING,
        Event.ROLL_BACK: State.OFFLOADED,
        Event.SPARE: State.DIRTY_FAILED,
    },
    State.WRITING: {
        Event.USE: State.USED_WRITING,
        Event.CREATE: State.USED_REDIRTY,
        Event.DROP: State.OFFLOADED,
        Event.WRITE_DONE: State.CLEAN,
        Event.WRITE_FAILED: State.DIRTY_FAILED,
    },
    State.REDIRTY: {
        Event.USE: State.USED_REDIRTY,
        Event.CREATE: State.USED_REDIRTY,
        Event.WRITE_DONE: State.DIRTY,
        Event.WRITE_FAILED: State.DIRTY,
    },
    State.USED: {
        Event.RELEASE_CLEAN: State.CLEAN,
        Event.RELEASE_DIRTY: State.DIRTY,
        Event.SPARE: State.USED_DIRTY,
    },
    State.USED_DIRTY: {
        Event.RELEASE_CLEAN: State.DIRTY,
        Event.RELEASE_DIRTY: State.DIRTY,
        Event.SPARE: State.USED_DIRTY,
    },
    State.USED_WRITING: {
        Event.RELEASE_CLEAN: State.WRITING,
        Event.RELEASE_DIRTY: State.REDIRTY,
        Event.WRITE_DONE: State.USED,
        Event.WRITE_FAILED: State.USED_DIRTY,
    },
    State.USED_REDIRTY: {
        Event.RELEASE_CLEAN: State.REDIRTY,
        Event.RELEASE_DIRTY: State.REDIRTY,
        Event.WRITE_DONE: State.USED_DIRTY,
        Event.WRITE_FAILED: State.USED_DIRTY,
    },
}

# The next state, by state and event; None if the event cannot happen.
TABLE: list[list[State | None]] = [[_ROWS[state].get(event) for event in Event] for state in State]
