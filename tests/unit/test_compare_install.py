from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from sweeps.compare import install


def test_what_is_there_stays_and_what_cannot_be_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers = (
        install._Peer("json", ("json",)),
        install._Peer("not_a_module", ("not-a-package",), lambda: "it is of no use here"),
        install._Peer("not_a_module", ("not-a-package",), builds=True),
    )
    monkeypatch.setattr(install, "_PEERS", peers)
    ran = CliRunner().invoke(install.main, ["--wheels", str(tmp_path)], catch_exceptions=False)
    assert ran.exit_code == 0
    there, hindered, missing = ran.output.splitlines()
    assert there == "json: there already"
    assert hindered == "not_a_module: left out, it is of no use here"
    assert (
        missing
        == "not_a_module: left out, pip says: ERROR: No matching distribution found for not-a-package"
    )
