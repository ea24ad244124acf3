"""A file of tensors that other processes map: what it takes, and what is left of it."""

import multiprocessing
import os
import pickle
import resource
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from lightrft.strategy.sglang_utils.mapped_file import MappedTensor, MediaFile, TensorPlace, map_tensor

ROOT = Path(__file__).parents[2]


def test_tensors_of_several_dtypes_come_back_and_results_of_them_are_plain(tmp_path: Path) -> None:
    """Offsets are aligned: 15 bytes of bf16 and padding are between the others."""
    tensors = [torch.randn(3, 5), torch.randn(7).bfloat16(), torch.arange(6).view(2, 3).T, torch.randn(2, 2, 2)]
    with MediaFile.opened(tmp_path) as file, warnings.catch_warnings():
        # PyTorch warns of memory that is not to be written to.
        warnings.simplefilter("error")
        for stored, tensor in [(file.add(tensor), tensor) for tensor in tensors]:
            mapped = map_tensor(stored)
            assert torch.equal(mapped, tensor) and mapped.dtype == tensor.dtype
            # A cut travels with its numbers, not as the whole.
            assert type(mapped[:1]) is type(mapped.to(torch.float64)) is torch.Tensor
            assert torch.equal(torch.cat([mapped, mapped]), torch.cat([tensor, tensor]))


def test_what_is_written_to_a_mapped_tensor_is_seen_by_those_who_map_it_and_not_in_the_file(tmp_path: Path) -> None:
    with MediaFile.opened(tmp_path) as file:
        stored = file.add(torch.zeros(4))
        mapped = map_tensor(stored)
        mapped += 1
        # One mapping for all that are there, and a new one then.
        assert map_tensor(stored).tolist() == [1.0] * 4
        del mapped
        assert map_tensor(stored).tolist() == [0.0] * 4


def test_another_process_maps_the_file_and_so_does_the_one_that_it_sends_it_to(tmp_path: Path) -> None:
    with MediaFile.opened(tmp_path) as file:
        tensor = torch.randn(1000, 100)
        sent = pickle.dumps(TensorPlace(file.add(tensor)))
        for _ in range(2):
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                total, sent = pool.apply(sum_and_pickle, (sent,))
            assert total == tensor.double().sum().item() and len(sent) < 400


def sum_and_pickle(sent: bytes) -> tuple[float, bytes]:
    tensor = pickle.loads(sent)
    assert type(tensor) is MappedTensor
    return tensor.double().sum().item(), pickle.dumps(tensor)


def test_a_file_takes_its_space_with_it_and_what_is_mapped_stays(tmp_path: Path) -> None:
    with MediaFile.opened(tmp_path) as file:
        stored = file.add(torch.ones(4))
        mapped = map_tensor(stored)
        assert list(tmp_path.iterdir()) == []
    assert mapped.tolist() == [1.0] * 4
    with pytest.raises(FileNotFoundError):
        map_tensor(stored)


def test_the_next_file_is_not_mistaken_for_one_that_is_still_mapped(tmp_path: Path) -> None:
    """It gets the number of the closed one."""
    found = []
    for value in range(3):
        with MediaFile.opened(tmp_path) as file:
            found.append((stored := file.add(torch.full((4,), float(value))), map_tensor(stored)))
    assert len({stored for stored, _ in found}) == 1
    assert [mapped[0].item() for _, mapped in found] == [0.0, 1.0, 2.0]


def test_nothing_is_left_when_the_process_is_killed(tmp_path: Path) -> None:
    """Its space is free: nobody has the file open, and no folder names it."""
    program = (
        "import pathlib, sys, time, torch; from lightrft.strategy.sglang_utils.mapped_file import MediaFile\n"
        "with MediaFile.opened(pathlib.Path(sys.argv[1])) as file:\n"
        "    print(file.add(torch.ones(4)).path, flush=True); time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", program, tmp_path], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    path = process.stdout.readline().strip()
    assert os.path.exists(path)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not os.path.exists(path) and list(tmp_path.iterdir()) == []


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_named_with_what_is_missing_and_a_remedy(tmp_path: Path) -> None:
    """6,000 bytes go in; 4,000 more begin at 6,016, and 8,192 is the limit: 2,176 of them fit, 1,824 do not."""
    with MediaFile.opened(tmp_path) as file:
        file.add(torch.ones(1500))
        with (
            files_of_at_most(8192),
            pytest.raises(
                RuntimeError, match=rf"file in {tmp_path}: 1,824 of its 10,016 bytes .*\(.+\)\. Set TMPDIR to"
            ),
        ):
            file.add(torch.ones(1000))
