import enum

from _typeshed import ReadableBuffer

class Access(enum.Enum):
    READ = 0
    WRITE = 1
    READ_WRITE = 2

class Direct(enum.Enum):
    REQUIRED = 0
    AUTOMATIC = 1
    OFF = 2

class FaultKind(enum.Enum):
    FAIL = 0
    CUT = 1
    REFUSE = 2
    DELAY = 3

class Fault:
    def __init__(self, transfer: int, count: int, kind: FaultKind, value: int) -> None: ...

class Memory:
    def __init__(self, nbytes: int, in_child: bool = True, reserve: int = 0) -> None: ...
    def grow(self, nbytes: int) -> None: ...
    def populate(self) -> None: ...
    def lock(self) -> int: ...
    @property
    def address(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

def buffer_nbytes(exporter: ReadableBuffer, writable: bool) -> int: ...

class File:
    @staticmethod
    def open(path: bytes, access: Access, direct: Direct, nbytes: int) -> File: ...
    @staticmethod
    def open_anonymous(directory: bytes, direct: Direct, nbytes: int, padded: bool) -> File: ...
    def sync(self) -> None: ...
    @property
    def path(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def direct(self) -> bool: ...
    @property
    def memory_alignment(self) -> int: ...
    @property
    def offset_alignment(self) -> int: ...

class Request:
    def done(self) -> bool: ...
    def wait(self, timeout_seconds: float | None = None) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def checksum(self) -> int | None: ...

def fail_at_exit() -> None: ...
def cancel(requests: list[Request]) -> bool: ...

_Direction = tuple[int, int, int, int, float]

class Engine:
    def __init__(
        self,
        backend: str,
        block_size: int,
        queue_depth: int,
        thread_count: int,
        single_submit: bool,
        overlap_events: bool,
        faults: list[Fault],
    ) -> None: ...
    def submit(
        self,
        write: bool,
        exporter: ReadableBuffer,
        file: File,
        offset: int,
        checksum: bool | int | Request,
        after: list[Request],
    ) -> Request: ...
    def submit_at(
        self,
        write: bool,
        address: int,
        nbytes: int,
        owner: object,
        file: File,
        offset: int,
        checksum: bool | int | Request,
        after: list[Request],
    ) -> Request: ...
    def require_live(self) -> None: ...
    def close(self) -> None: ...
    @property
    def closed(self) -> bool: ...
    def stats(
        self,
    ) -> tuple[_Direction, _Direction, tuple[str, str, int, int, float] | None]: ...

def fingerprint(address: int, nbytes: int) -> tuple[int, int] | None: ...
def split(master: int, working: int, low: int, count: int, threads: int) -> None: ...
def join(working: int, low: int, master: int, count: int, threads: int) -> None: ...
def split_short(master: int, working: int, low: int, count: int, threads: int) -> None: ...
def join_short(working: int, low: int, master: int, count: int, threads: int) -> None: ...
def round_to_24(
    values: int, count: int, table: int, factors: int, summands: int, threads: int
) -> None: ...
def encode(
    values: int,
    codes: int,
    exponents: int,
    count: int,
    signed: bool,
    table: int,
    factors: int,
    summands: int,
    threads: int,
) -> None: ...
def decode(
    codes: int, exponents: int, values: int, count: int, signed: bool, threads: int
) -> None: ...
def mark_far(values: int, first: int, far: int, count: int, eps: float, threads: int) -> None: ...

class Vectors(enum.Enum):
    BASELINE = 0
    AVX2 = 1
    AVX512 = 2

def widest_vectors() -> Vectors: ...

class AdamFormula(enum.Enum):
    TORCH = 0
    DEEPSPEED = 1

class Element(enum.Enum):
    FLOAT32 = 0
    BFLOAT16 = 1
    FLOAT16 = 2

class AdamStep:
    def __init__(
        self,
        *,
        formula: AdamFormula,
        tail: int,
        weight: float,
        beta1: float,
        beta2: float,
        square_weight: float,
        decays: bool,
        decoupled: bool,
        decay: float,
        maximize: bool,
        correction: float,
        eps: float,
        step_size: float,
        square_roots: int,
        set_mkl_threads: int,
    ) -> None: ...

class Moment:
    def __init__(
        self, *, values: int = ..., codes: int = ..., exponents: int = ..., seed: int = ...
    ) -> None: ...

def adam(
    *,
    count: int,
    gradient: int,
    gradient_element: Element,
    master: int,
    working: int,
    working_element: Element,
    low: int,
    low_bytes: int,
    master_seed: int,
    first: Moment,
    second: Moment,
    table: int,
    first_block: int,
    step: AdamStep,
    threads: int,
) -> bool: ...
