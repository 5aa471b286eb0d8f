"""vLLM's CPU kernels have a cache of eight-bit numbers where the processor has AVX-512 or AMX; elsewhere they refuse it."""

from __future__ import annotations

import torch

EIGHT_BITS = torch.cuda.is_available() or torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()
collect_ignore = ["test_no_fp8_cache.py" if EIGHT_BITS else "test_fp8_cache.py"]
