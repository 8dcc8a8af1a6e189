"""What makes a CPU train faster without changing what it computes: settings of the process, made when training starts.

Each function changes its setting where that pays, and returns a sentence for the log about what it did and why. None of
them measures time, so that a training that is resumed computes as it did before.
"""

import ctypes
from pathlib import Path

import torch

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # the numbers of glibc's malloc.h
EXACT = 1e-5  # relative error of a product that was computed in float32: bfloat16 is off by 2e-3


def keep_freed_memory() -> str:
    """Let glibc's malloc keep what is freed for the next step.

    By default the large tensors of every step are fetched from the kernel, which clears them page by page, and given
    back. Kept, the memory of the process stays at its peak.

    Returns:
        What was done.
    """
    try:
        libc = ctypes.CDLL(None)
        libc.gnu_get_libc_version  # noqa: B018  (other libraries have a mallopt that does nothing)
    except (AttributeError, OSError, TypeError):  # musl or macOS, no library, Windows
        return "freed memory is kept or given back as this system has it, which has no glibc"
    # No block comes from the kernel by itself, and the heap never shrinks.
    done = libc.mallopt(M_MMAP_MAX, 0) and libc.mallopt(M_TRIM_THRESHOLD, -1)
    return "freed memory is kept for the next step" if done else "freed memory is given back: glibc refused to keep it"


def use_fastest_exact_products() -> str:
    """Compute float32 matrix products by oneDNN in place of MKL where that is about twice as fast: on AMD's processors
    with AVX-512.

    torch sends float32 products to oneDNN when it is allowed to round them to bfloat16. Without AMX it does not round
    them, and the products of both libraries are equally exact; that is tried, and taken back if they are not.

    Returns:
        What was done.
    """
    vendor, features = _processor()
    settings = getattr(torch.backends.mkldnn, "matmul", None)
    if vendor != "AuthenticAMD" or "avx512f" not in features:
        return "float32 products are computed as torch has it: oneDNN is faster on AMD's processors with AVX-512 alone"
    if "amx_tile" in features:
        return "float32 products are computed as torch has it: with AMX, oneDNN would round them to bfloat16"
    if not hasattr(settings, "fp32_precision"):
        return f"float32 products are computed as torch has it: torch {torch.__version__} does not let oneDNN do them"
    before = settings.fp32_precision
    settings.fp32_precision = "bf16"
    error = _error_of_products()
    if error < EXACT:
        return f"float32 products are computed by oneDNN, faster on this processor; relative error {error:.0e}"
    settings.fp32_precision = before
    return f"float32 products are computed as torch has it: oneDNN's have a relative error of {error:.0e}"


def _processor():
    """Vendor and features of the processor, as Linux writes them down; nothing elsewhere."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return fields.get("vendor_id", ""), set(fields.get("flags", "").split())


def _error_of_products():
    """Largest relative error, in the norm, of the three products of a linear layer's step: forward, and two gradients.

    Measured against float64. torch leaves the smallest products to other code; these are beyond that.
    """
    generator = torch.Generator().manual_seed(0)  # dropout's must not notice
    a, b, c = (torch.randn(*size, generator=generator) for size in ((256, 512), (384, 512), (256, 384)))
    errors = []
    for left, right in ((a, b.T), (c, b), (c.T, a)):
        expected = left.double() @ right.double()
        errors.append(((left @ right - expected).norm() / expected.norm()).item())
    return max(errors)
