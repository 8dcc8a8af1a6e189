"""Settings that make a CPU faster: where they are made, and that products stay exact."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from vanilla_transformer import cpu

SOURCE = Path(cpu.__file__).parents[1]
AMD = ("AuthenticAMD", {"avx512f", "avx512bw", "avx512_bf16"})


@pytest.fixture
def settings():
    """oneDNN's setting, put back after the test."""
    settings = getattr(torch.backends.mkldnn, "matmul", None)
    if not hasattr(settings, "fp32_precision"):
        pytest.skip("this torch does not let oneDNN compute float32 products")
    before = settings.fp32_precision
    yield settings
    settings.fp32_precision = before


def run_python(code, **environment):
    """What a fresh interpreter prints."""
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), **environment}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("processor", "why"),
    [
        (("GenuineIntel", {"avx512f", "avx512_bf16"}), "AMD's processors with AVX-512 alone"),
        (("AuthenticAMD", {"avx2"}), "AMD's processors with AVX-512 alone"),
        (("", set()), "AMD's processors with AVX-512 alone"),
        (("AuthenticAMD", {"avx512f", "amx_tile"}), "with AMX"),
    ],
)
def test_products_are_left_to_torch_on_other_processors(monkeypatch, settings, processor, why):
    monkeypatch.setattr(cpu, "_processor", lambda: processor)
    before = settings.fp32_precision
    assert why in cpu.use_fastest_exact_products()
    assert settings.fp32_precision == before


@pytest.mark.parametrize(("error", "expected"), [(4e-7, "bf16"), (2e-3, "none"), (float("nan"), "none")])
def test_onednn_is_kept_only_where_its_products_are_exact(monkeypatch, settings, error, expected):
    monkeypatch.setattr(cpu, "_processor", lambda: AMD)
    monkeypatch.setattr(cpu, "_error_of_products", lambda: error)
    settings.fp32_precision = "none"
    said = cpu.use_fastest_exact_products()
    assert settings.fp32_precision == expected
    assert ("by oneDNN" in said) == (expected == "bf16")


def test_products_are_exact_whatever_was_decided(monkeypatch, settings):
    monkeypatch.setattr(cpu, "_processor", lambda: AMD)  # where this one has AMX, oneDNN rounds, and is not taken
    cpu.use_fastest_exact_products()
    a, b = torch.randn(300, 600, dtype=torch.float64), torch.randn(600, 400, dtype=torch.float64)
    assert ((a.float() @ b.float()).double() - a @ b).norm() < 1e-5 * (a @ b).norm()


def test_products_rounded_to_bfloat16_are_seen(monkeypatch):
    assert cpu._error_of_products() < 1e-6
    rounded = torch.Tensor.__matmul__
    monkeypatch.setattr(
        torch.Tensor,
        "__matmul__",
        lambda a, b: rounded(a.bfloat16(), b.bfloat16()).float() if a.dtype == torch.float32 else rounded(a, b),
    )
    assert cpu._error_of_products() > 1e-3


def test_the_check_draws_no_random_numbers_from_dropout(monkeypatch, settings):
    monkeypatch.setattr(cpu, "_processor", lambda: AMD)
    before = torch.get_rng_state()
    cpu.use_fastest_exact_products()
    assert torch.equal(torch.get_rng_state(), before)


def test_the_processor_is_read_as_linux_writes_it(monkeypatch, tmp_path):
    text = "processor\t: 0\nvendor_id\t: AuthenticAMD\nflags\t\t: fpu avx512f\n\nprocessor\t: 1\n"
    (tmp_path / "cpuinfo").write_text(text, encoding="utf-8")
    monkeypatch.setattr(cpu, "Path", lambda _: tmp_path / "cpuinfo")
    assert cpu._processor() == ("AuthenticAMD", {"fpu", "avx512f"})
    (tmp_path / "cpuinfo").unlink()
    assert cpu._processor() == ("", set())


# How many pages of 4 KiB a process fetches from the kernel for ten tensors of 64 MiB, one after the other.
FETCH = """
import resource, torch
from vanilla_transformer.cpu import keep_freed_memory
{}
torch.ones(2**24)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    torch.ones(2**24)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_freed_memory_is_kept_for_the_next_tensor():
    pages_of_a_tensor = 2**14
    assert int(run_python(FETCH.format(""))) >= 10 * pages_of_a_tensor
    kept = "assert keep_freed_memory() == 'freed memory is kept for the next step'"
    assert int(run_python(FETCH.format(kept))) < 2 * pages_of_a_tensor


@pytest.mark.parametrize("error", [OSError, TypeError, AttributeError])
def test_another_c_library_is_left_alone(monkeypatch, error):
    def load(name):
        raise error

    monkeypatch.setattr(cpu.ctypes, "CDLL", load)
    assert "no glibc" in cpu.keep_freed_memory()
