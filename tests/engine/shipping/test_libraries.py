"""Code of libraries: by name where the server has them, as source where it does not, and otherwise refused in the notebook."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import regex
import torch

import interpose
from interpose.contract.packages import Packages
from interpose.program.libraries import Libraries, imports
from interpose.v1.service_pb2 import ListPackagesReply, Package
from tests.engine.shipping.library import NAME, installed
from tests.engine.shipping.worker import Shipped


def server(*packages: tuple[str, str], sandboxed: bool = False) -> Libraries:
    """What a server has beside torch and numpy."""
    listed = [
        Package(name=name, version=version, modules=[name.replace("-", "_")])
        for name, version in (("torch", "2.9"), ("numpy", "2.2"), *packages)
    ]
    known = Packages.of(ListPackagesReply(packages=listed, python_version="3.11.9", sandboxed=sandboxed))
    return Libraries(lambda: known)


@pytest.fixture
def tiny_sae(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    with installed(tmp_path, monkeypatch) as library:
        yield library


def names_in(trace: Any) -> set[str]:
    """The modules that a trace names."""
    found = set()
    for value in trace.scope.values:
        found |= set(re.findall(r'(?:python_module|module): "([\w.]+)"', str(value)))
    for binding in trace.invokes[0].program.reads:
        found |= set(re.findall(r'(?:python_module|module): "([\w.]+)"', str(binding)))
    return found


def test_a_library_that_the_server_lacks_travels_as_source(tiny_sae: ModuleType) -> None:
    sae, x = tiny_sae.load(3), torch.randn(5, 4)
    expected = sae(x).detach()
    scaled, kinds = tiny_sae.scaled, tiny_sae.Names
    with Shipped(libraries=server()) as shipped:
        out = sae(x).save()
        features = sae.encode(x).save()
        twice = tiny_sae.util.scaled(x).save()
        other = (scaled(1.0), kinds.NONE.value, type(sae).default().config.features).save()
    assert torch.allclose(out, expected) and torch.allclose(features, sae.encode(x).detach())
    assert torch.equal(twice, 2 * x) and other == (2.0, "none", 8)
    assert not any(name.startswith(NAME) for name in names_in(shipped.trace))
    assert shipped.logs == "", "what a library logs goes nowhere"


def test_a_library_that_the_server_has_travels_by_name(tiny_sae: ModuleType) -> None:
    sae, scaled = tiny_sae.load(3), tiny_sae.scaled
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Shipped(libraries=server(("tiny-sae", "1.2"))) as shipped:
            found = (scaled(1.0), sae.config.features, sae.config.metadata.version, sae.config.metadata.other).save()
    assert found == (2.0, 8, "1.2", None)
    assert f"{NAME}.util" in names_in(shipped.trace) and not any(
        value.HasField("function") for value in shipped.trace.scope.values
    )


def test_an_object_of_the_servers_library_with_a_state_of_its_own_is_refused(tiny_sae: ModuleType) -> None:
    half = sys.modules[f"{NAME}.sae"].Half(version="1.2", path="a file of the notebook's machine")
    with pytest.raises(interpose.InvalidArgument, match=r"tiny_sae\.sae\.Half cannot travel"):
        with Shipped(libraries=server(("tiny-sae", "1.2"))):
            found = half.version.save()


def test_of_another_version_the_notebooks_own_code_runs(tiny_sae: ModuleType) -> None:
    scaled = tiny_sae.scaled
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Shipped(libraries=server(("tiny-sae", "0.9"))) as shipped:
            found = (scaled(1.0), tiny_sae.util.scaled(2.0)).save()
    assert found == (2.0, 4.0)
    assert not any(name.startswith(NAME) for name in names_in(shipped.trace))


def test_where_that_cannot_be_sent_the_servers_version_runs_with_a_warning(tiny_sae: ModuleType) -> None:
    tiny_sae.util.SCALE = iter([1])  # nothing that can be sent
    scaled = tiny_sae.scaled
    with pytest.warns(
        interpose.InterposeWarning, match=r"tiny-sae 0\.9 of the server, not tiny-sae 1\.2 .*tiny-sae==0\.9"
    ):
        with Shipped(libraries=server(("tiny-sae", "0.9"))) as shipped:
            found = scaled.__name__.save()
    assert found == "scaled" and f"{NAME}.util" in names_in(shipped.trace)


def test_compiled_code_is_refused_with_what_the_server_has_and_the_remedy() -> None:
    pattern = regex.compile("a+")
    with pytest.raises(interpose.InvalidArgument) as caught:
        with Shipped(libraries=server(("regexp", "3.0"))):
            found = pattern.findall("aa").save()
    message = str(caught.value)
    assert "The server does not have regex 20" in message
    assert "The server's Python has regexp 3.0, torch 2.9, numpy 2.2." in message
    assert 'pip install "regex==20' in message
    assert [frame.line for frame in caught.value.frames] and "pattern.findall" in caught.value.frames[0].text


def test_in_a_sandbox_there_is_less() -> None:
    pattern = regex.compile("a+")
    with pytest.raises(interpose.InvalidArgument, match=r"The server's sandbox has torch 2\.9, numpy 2\.2\."):
        with Shipped(libraries=server(sandboxed=True)):
            found = pattern.findall("aa").save()


def test_an_import_in_a_block_is_refused_before_anything_is_sent(tiny_sae: ModuleType) -> None:
    with pytest.raises(
        interpose.InvalidArgument, match=r"the block imports tiny_sae\.util, which .* above the block"
    ) as caught:
        with Shipped(libraries=server()):
            from tiny_sae.util import scaled

            found = scaled(1.0).save()
    assert "from tiny_sae.util import" in caught.value.frames[0].text


def test_an_import_in_a_function_of_the_notebook_is_refused_too(tiny_sae: ModuleType) -> None:
    def doubled(x: float) -> Any:
        import tiny_sae

        return tiny_sae.scaled(x)

    with pytest.raises(interpose.InvalidArgument, match="the function doubled imports tiny_sae"):
        with Shipped(libraries=server()):
            found = doubled(1.0).save()


def test_pythons_own_modules_and_imports_that_may_fail_are_taken() -> None:
    with Shipped(libraries=server()):
        import math

        try:
            import no_such_library
        except ImportError:
            no_such_library = math
        found = no_such_library.sqrt(4.0).save()
    assert found == 2.0


def test_a_module_itself_is_not_sent(tiny_sae: ModuleType) -> None:
    with pytest.raises(
        interpose.InvalidArgument, match=r"the module tiny_sae is not on the server, so only what is read"
    ):
        with Shipped(libraries=server()):
            found = getattr(tiny_sae, "scaled")(1.0).save()  # noqa: B009


def test_an_unknown_server_is_taken_to_have_everything(tiny_sae: ModuleType) -> None:
    scaled = tiny_sae.scaled
    with Shipped(libraries=Libraries()) as shipped:
        found = scaled(1.0).save()
    assert found == 2.0 and f"{NAME}.util" in names_in(shipped.trace)


def test_imports_are_found_wherever_they_stand() -> None:
    import ast

    text = "import a.b, c\nfor x in y:\n    from d import e\ntry:\n    import f\nexcept ImportError:\n    pass\nfrom . import g\n"
    assert [name for name, _ in imports(ast.parse(text).body)] == ["a.b", "c", "d"]
