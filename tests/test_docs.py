import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import tiny_models
from tests.distributed.torchrun import torchrun

PAGE = Path(__file__).parents[1] / "docs" / "python_api.md"


def snippets(text: str) -> dict[str, str]:
    """Files of a page: a snippet whose first line is `# name.py` goes there, any other into train.py, in order."""
    files: dict[str, str] = {}
    for code in re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        named = re.match(r"# (\w+\.py)\n", code)
        name = named[1] if named else "train.py"
        files[name] = files.get(name, "") + code
    return files


def fenced(*codes: str) -> str:
    return "text\n".join(f"```{code}```\n" for code in codes)


def test_snippets_are_found_by_the_file_that_they_name():
    page = fenced("python\n# train.py\na = 1\n", "python\n# b.py\nb = 1\n", "\nno = 1\n", "python\na += 1\n")
    assert snippets(page) == {"train.py": "# train.py\na = 1\na += 1\n", "b.py": "# b.py\nb = 1\n"}


def run_plainly(script: Path) -> tuple[int, str]:
    command = [sys.executable, str(script)]
    ended = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=200, check=False
    )
    return ended.returncode, ended.stdout


def run_on_two_ranks(script: Path) -> tuple[int, str]:
    ended = torchrun(script, timeout=200)
    assert ended.left == []
    return ended.returncode, ended.output


def run_page(folder: Path, run: Callable[[Path], tuple[int, str]]) -> None:
    """`path/to/model` is a folder of where the snippets run; the script makes one trainer after the other."""
    tiny_models.save_model(folder / "path" / "to" / "model")
    for name, code in snippets(PAGE.read_text()).items():
        (folder / name).write_text(code)
    returncode, output = run(folder / "train.py")
    assert returncode == 0, output
    assert re.findall(r"^after step (\d+): [01]\.\d\d$", output, re.MULTILINE) == ["0", "2"]
    for name in ("first", "second", "mine"):
        assert (folder / "runs" / name / "summary.json").is_file()


@pytest.mark.parametrize("run", [run_plainly, run_on_two_ranks])
def test_every_snippet_of_the_python_page_runs(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, value in {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}.items():
        monkeypatch.setenv(name, value)
    run_page(tmp_path, run)
