"""Canonical values over pipeline stages: each stage describes the values of its own layers.

A view is data except for its module, so the fields of the view and the path of the module travel.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any

import torch
from torch import nn

from executor.model.layouts import Layouts
from executor.model.node import Node, Unreachable, View
from executor.model.tree import ModuleTree
from executor.views.expert_values import KINDS, ExpertValue
from executor.views.experts import ChosenThere
from executor.views.pattern import PATTERN, Pattern
from executor.views.probe import Event, ProbeRun
from executor.views.view import Part, Scaled, Shared, Stream

_VIEWS: tuple[type[View], ...] = (Part, Scaled, Shared, Stream, Pattern, Unreachable, ChosenThere, ExpertValue)
_KINDS = {kind.__name__: kind for kind in _VIEWS}
Told = tuple[str, str, dict[str, tuple[str, dict[str, Any]]], list[Any]]  # path, title, views, children


def events_of(probe: ProbeRun) -> list[Event]:
    """Return what other stages need of a probe run.

    The tensors are on the CPU, because the stages have different devices.
    """
    return [_on(event, torch.device("cpu"), value=None) for event in probe.events]


def probe_of(stages: Iterable[list[Event]], device: torch.device) -> ProbeRun:
    """Return the probe run of a forward through all stages, on a device."""
    events = [event for stage in stages for event in stage]
    return ProbeRun([_on(event, device, index=i) for i, event in enumerate(events)])


def _on(event: Event, device: torch.device, **fields: Any) -> Event:
    return replace(event, tensors={at: tensor.to(device) for at, tensor in event.tensors.items()}, **fields)


def tell(node: Node) -> Told:
    """Return a canonical node and its descendants as data."""
    views = {name: (type(view).__name__, _fields(view)) for name, view in node.views.items()}
    return node.path, node.title, views, [tell(child) for child in node.children.values()]


def _fields(view: View) -> dict[str, Any]:
    return {one.name: getattr(view, one.name) for one in fields(view) if one.name != "node"} | {"node": view.node.path}


def told(tree: ModuleTree, data: Told) -> Node:
    """Return the canonical node of another stage from its data."""
    path, title, views, children = data
    node = Node(path, None, Layouts(path, nn.Identity(), 1), title=title)
    for name, (kind, values) in views.items():
        raw = node if values["node"] == path else tree.find(values["node"])
        view = _KINDS[kind](**{**values, "node": raw})
        if isinstance(view, Pattern):
            tree.place_before(view.node.path, "output", PATTERN)
        if isinstance(view, ExpertValue):
            tree.place_before(view.node.path, "output", *KINDS)
        node.views[name] = view
    for child in children:
        below = told(tree, child)
        node.children[below.path.rpartition(".")[2]] = below
    return node
