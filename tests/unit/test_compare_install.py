from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from sweeps.compare import install


def test_installed_peers_stay_and_failures_are_reported(
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
    assert there == "json: already installed"
    assert hindered == "not_a_module: skipped, it is of no use here"
    assert (
        missing
        == "not_a_module: skipped, pip reports: ERROR: No matching distribution found for not-a-package"
    )
