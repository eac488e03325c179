"""A file with any single fault is refused with a typed error, or read with the contents that were
saved.

The latter happens where the byte means nothing, such as a space in JSON.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from profiles import profile

from nvme_offload.errors import OffloadError
from nvme_offload.hardware.profile import Profile

sys.path.append(str(Path(__file__).parent))

import damage

# faults in each kind of file; 10,000 including tests/zero3/test_checkpoint_faults.py
FEW, MANY = 50, 2500
Check = Callable[[], bool]  # raises the reader's error; True if the reader reported no fault


def campaign(files: dict[Path, Any], check: Check, count: int, seed: int) -> Counter[str]:
    """How often a fault in one of *files*, each with the kinds that fit it, was refused and how
    often it meant nothing.
    """
    draw = random.Random(seed)
    whole = {path: path.read_bytes() for path in files}
    assert check()
    ends: Counter[str] = Counter()
    while sum(ends.values()) < count:
        path = draw.choice(list(files))
        kind = draw.choice(files[path])
        data = kind(whole[path], draw)
        if data == whole[path]:
            continue
        path.write_bytes(data)
        try:
            same = check()
        except OffloadError as error:
            ends["refused" if "\n" not in str(error) else "refused in several lines"] += 1
        except Exception as error:
            pytest.fail(
                f"fault {sum(ends.values())}, {kind.__name__} in {path.name}: untyped {error!r}"
            )
        else:
            assert same, (
                f"fault {sum(ends.values())}, {kind.__name__} in {path.name}: accepted silently"
            )
            ends["the same"] += 1
        path.write_bytes(whole[path])
    assert check()
    assert set(ends) <= {"refused", "the same"}
    return ends


@pytest.fixture(
    params=[pytest.param(FEW, id="few"), pytest.param(MANY, id="many", marks=pytest.mark.slow)]
)
def count(request: pytest.FixtureRequest) -> int:
    number: int = request.param
    return number


def test_profiles(count: int, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    saved = profile(runs=8)
    path.write_text(saved.to_json())
    saved = Profile.load(path)
    ends = campaign({path: damage.TEXT}, lambda: Profile.load(path) == saved, count, 1)
    assert ends["refused"] > 0.9 * count
