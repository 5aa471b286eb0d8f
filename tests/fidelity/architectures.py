"""Further architectures of the page: only their canonical values are measured, over one and two tensor-parallel ranks.

Each is a configuration of transformers that vLLM has code of its own for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from interpose.cli.demo_model import Shape

# Two layers show both kinds of those that alternate, and make two stages. Of the two key/value heads four ranks hold copies.
SHAPE = Shape(layers=2, hidden=128, context=256)

# The name of a column, and its configuration.
LIGHT: dict[str, Callable[[], Any]] = {}
