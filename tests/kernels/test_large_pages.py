"""The hint about large pages: taken where it can be, harmless elsewhere."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from trunkline.kernels.cpu import PackedMemory
from trunkline.kernels.large_pages import LARGE_PAGE_BYTES, advise_large_pages, collect_large_pages


def advised(address: int) -> bool:
    """Whether the mapping around an address carries the flag (`hg` in smaps)."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split(" ", 1)[0]
        if "-" in head and not head.endswith(":"):
            low, high = (int(part, 16) for part in head.split("-"))
            inside = low <= address < high
        elif inside and line.startswith("VmFlags:"):
            return " hg" in line
    return False


@pytest.mark.skipif(sys.platform != "linux", reason="a hint of Linux")
def test_a_large_tensor_is_advised() -> None:
    data = torch.empty(32 << 20, dtype=torch.uint8)
    if not advise_large_pages(data):
        pytest.skip("this kernel has no large pages")
    assert advised(data.data_ptr() + (16 << 20))
    data.fill_(7)
    assert int(data.sum()) == 7 * data.numel()


def test_what_cannot_be_advised() -> None:
    assert not advise_large_pages(torch.empty(100, dtype=torch.uint8))
    assert not advise_large_pages(torch.empty(1 << 20, device="meta"))


def test_written_memory_is_collected_and_stays_as_it_is() -> None:
    memory = PackedMemory()
    taken = []
    for number, size in enumerate((100, 3 << 20, 5 << 20, 20 << 20, 64)):
        part = memory.take(size)
        assert part.numel() == size
        assert part.data_ptr() % 64 == 0
        part.fill_(number + 1)
        memory.written(part)
        taken.append(part)
    for number, part in enumerate(taken):
        assert bool((part == number + 1).all())


def test_what_holds_no_large_page_is_not_collected() -> None:
    assert not collect_large_pages(torch.zeros(LARGE_PAGE_BYTES // 2, dtype=torch.uint8))
    assert not collect_large_pages(torch.empty(1 << 24, device="meta"))
