"""Free memory is what this process may take, not what the machine has."""

import pytest
import torch

from ritz import memory

GIB = 2**30


def written(root, files: dict[str, str]):
    """A system whose files say so."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def group(folder: str, limit: str, used: int, cache: int, version: int = 2) -> dict[str, str]:
    names = ("memory.max", "memory.current", "inactive_file")
    if version == 1:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    stat = f"anon 17\n{names[2]} {cache}\nslab 3\n"
    return {f"{folder}/{names[0]}": f"{limit}\n", f"{folder}/{names[1]}": f"{used}\n", f"{folder}/memory.stat": stat}


SYSTEMS = {
    "no control groups": ({}, []),
    "no limit": ({"proc/self/cgroup": "0::/job\n", **group("sys/fs/cgroup/job", "max", 5, 2)}, []),
    "a limit": ({"proc/self/cgroup": "0::/job\n", **group("sys/fs/cgroup/job", "100", 70, 20)}, [(100.0, 50.0)]),
    "one of the group around": (
        {"proc/self/cgroup": "0::/job/step\n", **group("sys/fs/cgroup/job", "100", 70, 20),
         **group("sys/fs/cgroup/job/step", "90", 10, 0)}, [(90.0, 80.0), (100.0, 50.0)]),
    "a container that sees its own group alone": (
        {"proc/self/cgroup": "0::/../host/4711\n", **group("sys/fs/cgroup", "100", 99, 0)}, [(100.0, 1.0)]),
    "version 1": (
        {"proc/self/cgroup": "5:cpu:/job\n4:memory:/job\n0::/\n",
         **group("sys/fs/cgroup/memory/job", "100", 70, 20, version=1)}, [(100.0, 50.0)]),
    "more taken than allowed": (
        {"proc/self/cgroup": "0::/\n", **group("sys/fs/cgroup", "100", 120, 0)}, [(100.0, 0.0)]),
    "a file that is not read": ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "what\n"}, []),
}  # fmt: skip


@pytest.mark.parametrize("name", SYSTEMS)
def test_control_groups_leave_what_they_leave(name, tmp_path):
    files, left = SYSTEMS[name]
    assert list(memory._group_memory(written(tmp_path, files))) == left


def test_the_least_of_machine_and_groups_is_free(monkeypatch):
    cpu = torch.device("cpu")
    monkeypatch.setattr(memory, "_system_memory", lambda: iter([(80.0 * GIB, 64.0 * GIB)]))
    monkeypatch.setattr(memory, "_group_memory", lambda: iter([(20.0 * GIB, 8.0 * GIB), (18.0 * GIB, 16.0 * GIB)]))
    assert (memory.whole_memory(cpu), memory.free_memory(cpu)) == (18 * GIB, 8 * GIB)
    monkeypatch.setattr(memory, "_group_memory", lambda: iter([]))
    assert (memory.whole_memory(cpu), memory.free_memory(cpu)) == (80 * GIB, 64 * GIB)
    monkeypatch.setattr(memory, "_system_memory", lambda: iter([]))
    assert (memory.whole_memory(cpu), memory.free_memory(cpu)) == (float("inf"), None)


def test_the_memory_of_this_machine_is_read():
    cpu = torch.device("cpu")
    assert 0 < memory.free_memory(cpu) <= memory.whole_memory(cpu) < 2**50


@pytest.mark.parametrize(("share", "free"), [(1.0, 62), (0.5, 22), (0.25, 2), (0.2, 2)])
def test_a_process_has_no_more_of_a_gpu_than_its_share(share, free, monkeypatch):
    """80 GiB, 60 of them free; torch holds 20, of which tensors take 18."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 20 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 18 * GIB)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: share, raising=False)
    assert memory.free_memory(torch.device("cuda")) == free * GIB
