"""vLLM's CPU build has kernels for quantised weights where the processor has AVX-512; elsewhere such a model does not start."""

from __future__ import annotations

import torch

QUANTISED = torch.cuda.is_available() or torch.cpu._is_avx512_supported()
collect_ignore = ["test_no_quantised.py" if QUANTISED else "test_quantised.py"]
