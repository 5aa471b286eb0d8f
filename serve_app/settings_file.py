"""Reads the settings' YAML file once, and keeps the line of each setting for errors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml


class SettingsFile:
    """A YAML file with settings.

    Args:
        path: path of the file.

    Attributes:
        path: path of the file.
        values: contents of the file.

    Raises:
        ValueError: the file cannot be read, or is not YAML, or not a mapping; with the line and the column.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise ValueError(f"there is no configuration file {path}")
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is no UTF-8 text: {error.reason} at byte {error.start}") from None
        try:
            self._root = yaml.compose(text, Loader=yaml.SafeLoader)
            self._check(self._root)
            self.values: dict[str, Any] = yaml.safe_load(text) or {}
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            where = f":{mark.line + 1}:{mark.column + 1}" if mark is not None else ""
            begun = f" {error.context}" if error.context else ""
            raise ValueError(f"{path}{where}: this is no YAML: {error.problem}{begun}") from None
        except yaml.YAMLError as error:
            raise ValueError(f"{path}: this is no YAML: {error}") from None

    def line(self, keys: Sequence[str | int]) -> int:
        """Return the line number, from 1, of a setting by its keys and indices.

        A setting that is not in the file has the line of the setting that would contain it.
        """
        line, node = 1, self._root
        for part in keys:
            found = None
            if isinstance(node, yaml.MappingNode):
                found = next(((key, value) for key, value in node.value if key.value == str(part)), None)
            elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
                found = (node.value[part], node.value[part])
            if found is None:
                break
            key, node = found
            line = key.start_mark.line + 1
        return line

    def _check(self, root: yaml.Node | None) -> None:
        """Refuse a file that is not a mapping, or in which a key occurs twice.

        YAML would take the last of two equal keys without an error.
        """
        if root is not None and not isinstance(root, yaml.MappingNode):
            raise ValueError(f"{self.path}:{root.start_mark.line + 1}: settings have the form `name: value`")
        left: list[yaml.Node] = [root] if root is not None else []
        seen: set[int] = set()  # an alias makes the same node occur several times
        while left:
            node = left.pop()
            if id(node) in seen:
                continue
            seen.add(id(node))
            if isinstance(node, yaml.SequenceNode):
                left += node.value
            elif isinstance(node, yaml.MappingNode):
                lines: dict[str, int] = {}
                for key, value in node.value:
                    name, line = str(key.value), key.start_mark.line + 1
                    if name in lines and name != "<<":
                        raise ValueError(f"{self.path}:{line}: {name} is there twice, in line {lines[name]} before")
                    lines[name] = line
                    left.append(value)
