"""Large matrices of zeros: in memory, or in a file without a name that has its blocks from the start."""

import os
from pathlib import Path

import pytest
import torch

from schemas.errors import InputError
from trainer.rows.allocation import zeros


@pytest.mark.parametrize("where", ["memory", "file"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int32], ids=str)
def test_it_is_zeros_that_can_be_written_to(where: str, dtype: torch.dtype, tmp_path: Path) -> None:
    tensor = zeros((1000, 7), dtype, where if where == "memory" else str(tmp_path))
    assert tensor.shape == (1000, 7)
    assert tensor.dtype == dtype
    assert not tensor.any()
    tensor[999] = 3
    assert float(tensor.sum()) == 21
    assert zeros((0, 7), dtype).shape == (0, 7)


def test_a_file_takes_all_of_its_room_at_once_and_leaves_nothing(tmp_path: Path) -> None:
    tensor = zeros((1 << 18, 64), torch.float16, str(tmp_path))
    assert os.listdir(tmp_path) == []
    with open("/proc/self/maps") as maps:
        line = next(line for line in maps if str(tmp_path) in line)
    if os.geteuid() == 0:
        assert os.stat(f"/proc/self/map_files/{line.split()[0]}").st_blocks * 512 >= tensor.nbytes == 1 << 25


def test_no_room_and_no_directory_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"classifier.storage = .*rows .* need .*TiB, and .* are free"):
        zeros((1 << 40, 64), torch.float16, str(tmp_path))
    with pytest.raises(InputError, match=r"classifier.storage = .*gone.*No such file"):
        zeros((10, 64), torch.float16, str(tmp_path / "gone"))
