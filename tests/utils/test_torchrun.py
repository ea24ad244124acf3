"""`record`: what a script tells torchrun of its error."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
from lightrft.utils.torchrun import record

@record
def main(mistake):
    if mistake == "exit":
        raise SystemExit(3)
    if mistake:
        raise KeyError(mistake)
    return 7

try:
    assert main(sys.argv[1]) == 7
finally:
    print("torch" in sys.modules)
"""


@pytest.mark.parametrize(
    ("mistake", "returncode", "imports_torch"), [("", 0, "False"), ("exit", 3, "False"), ("lost", 1, "True")]
)
def test_an_error_is_in_torchruns_file_and_torch_is_imported_for_it_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mistake: str, returncode: int, imports_torch: str
):
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, mistake], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stdout.strip()) == (returncode, imports_torch), ended.stderr
    assert file.exists() == (mistake == "lost")
    if mistake == "lost":
        message = json.loads(file.read_text())["message"]
        assert message["message"] == "KeyError: 'lost'" and "in main" in message["extraInfo"]["py_callstack"]
        assert ended.stderr.count("KeyError: 'lost'") == 1
