"""A small library as a notebook has it installed: an autoencoder of its own, with what such libraries are made of."""

from __future__ import annotations

import importlib
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

from interpose.program import libraries
from interpose.wire import symbols

NAME = "tiny_sae"
FILES = {
    "tiny_sae/__init__.py": """
        from tiny_sae.sae import SAE, load
        from tiny_sae.util import Names, scaled
        __version__ = "1.2"
        """,
    "tiny_sae/util.py": """
        import enum
        import functools
        import logging
        import re

        logger = logging.getLogger(__name__)
        WORD = re.compile("[a-z]+")
        SCALE = 2.0

        class Names(enum.Enum):
            RELU = "relu"
            NONE = "none"

        @functools.lru_cache(maxsize=None)
        def factor(name):
            logger.warning("counted %s", name)
            return SCALE if WORD.match(name) else 0.0

        def scaled(x, name="relu"):
            return x * factor(name)

        def plotted(x):
            import a_library_for_pictures  # where it is drawn only
            return a_library_for_pictures.plot(x)
        """,
    "tiny_sae/sae.py": """
        from dataclasses import dataclass, field
        import torch
        from torch import nn
        from .util import Names, logger, scaled
        from . import util

        class Metadata:
            'As that of sae_lens: it has every name, and its state is its attributes.'

            def __init__(self, **known):
                self.__dict__.update(known)

            def __getattr__(self, name):
                return None

            def __getstate__(self):
                return self.__dict__

            def __setstate__(self, state):
                self.__dict__.update(state)

        class Half(Metadata):
            def __getstate__(self):
                return {"version": self.version}

        @dataclass
        class Config:
            width: int = 4
            features: int = 8
            activation: Names = Names.RELU
            metadata: Metadata = field(default_factory=lambda: Metadata(version="1.2"))

        class SAE(nn.Module):
            def __init__(self, config=Config()):
                super().__init__()
                self.config = config
                self.encoder = nn.Linear(config.width, config.features)
                self.decoder = nn.Linear(config.features, config.width, bias=False)

            def encode(self, x):
                x = self.encoder(x)
                return torch.relu(x) if self.config.activation is Names.RELU else x

            def forward(self, x):
                logger.info("forward")
                return scaled(self.decoder(self.encode(x)), self.config.activation.value)

            @classmethod
            def default(cls):
                return cls(Config())

        def load(seed, width=4):
            torch.manual_seed(seed)
            return SAE(Config(width)).eval()
        """,
}


@contextmanager
def installed(folder: Path, monkeypatch: pytest.MonkeyPatch, version: str = "1.2") -> Iterator[ModuleType]:
    """Install the library in a folder, for this process only."""
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(text))
    information = folder / f"{NAME}-{version}.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: tiny-sae\nVersion: {version}\n")
    (information / "RECORD").write_text("".join(f"{name},,\n" for name in FILES))
    (information / "top_level.txt").write_text(f"{NAME}\n")
    monkeypatch.syspath_prepend(folder)
    folders = (f"{folder.resolve()}/", *symbols._package_folders())
    monkeypatch.setattr(symbols, "_package_folders", lambda: folders)
    libraries._version.cache_clear()
    libraries.is_pure.cache_clear()
    yield importlib.import_module(NAME)
    for name in [name for name in sys.modules if name.partition(".")[0] == NAME]:
        del sys.modules[name]
    libraries._version.cache_clear()
    libraries.is_pure.cache_clear()
