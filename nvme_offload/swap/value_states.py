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


# The use of a value does not change where its newest version is.
_IN_USE = {
    State.CLEAN: State.USED,
    State.DIRTY: State.USED_DIRTY,
    State.DIRTY_FAILED: State.USED_DIRTY,
    State.WRITING: State.USED_WRITING,
    State.REDIRTY: State.USED_REDIRTY,
}
_IDLE_AGAIN = {used: idle for idle, used in _IN_USE.items()} | {State.USED_DIRTY: State.DIRTY}

# The next state, by event, for each state in which the event can happen.
_NEXT: dict[Event, dict[State, State]] = {
    Event.ALLOCATE: dict.fromkeys((State.NEW, State.OFFLOADED), State.RESERVED),
    Event.START_READ: {State.RESERVED: State.READING},
    Event.READ_DONE: {State.READING: State.CLEAN},
    Event.DROP: dict.fromkeys(
        (State.RESERVED, State.READING, State.CLEAN, State.WRITING), State.OFFLOADED
    ),
    Event.USE: _IN_USE,
    Event.CREATE: {
        **dict.fromkeys((State.RESERVED, *_IN_USE), State.USED_DIRTY),
        **dict.fromkeys((State.WRITING, State.REDIRTY), State.USED_REDIRTY),
    },
    Event.RELEASE_CLEAN: _IDLE_AGAIN,
    Event.RELEASE_DIRTY: _IDLE_AGAIN | {State.USED: State.DIRTY, State.USED_WRITING: State.REDIRTY},
    Event.START_WRITE: dict.fromkeys((State.DIRTY, State.DIRTY_FAILED), State.WRITING),
    Event.WRITE_DONE: {
        **{state: state for state in (State.OFFLOADED, State.RESERVED, State.READING)},
        State.WRITING: State.CLEAN,
        State.REDIRTY: State.DIRTY,
        State.USED_WRITING: State.USED,
        State.USED_REDIRTY: State.USED_DIRTY,
    },
    Event.WRITE_FAILED: {
        **dict.fromkeys((State.OFFLOADED, State.WRITING), State.DIRTY_FAILED),
        **dict.fromkeys((State.USED_WRITING, State.USED_REDIRTY), State.USED_DIRTY),
        State.REDIRTY: State.DIRTY,
    },
    Event.REATTACH: {State.OFFLOADED: State.WRITING},
    Event.ROLL_BACK: dict.fromkeys(
        (State.OFFLOADED, State.CLEAN, State.DIRTY, State.DIRTY_FAILED), State.OFFLOADED
    ),
    Event.SPARE: {
        **{state: state for state in (State.DIRTY, State.DIRTY_FAILED, State.USED_DIRTY)},
        State.CLEAN: State.DIRTY,
        State.USED: State.USED_DIRTY,
    },
}

# The next state, by state and event; None if the event cannot happen.
TABLE: list[list[State | None]] = [[_NEXT[event].get(state) for event in Event] for state in State]
