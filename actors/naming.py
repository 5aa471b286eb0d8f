"""The names under which actors find each other."""

from __future__ import annotations

NAMESPACE = "interpose"
DIRECTORY = "interpose-directory"
SESSION_PREFIX = "interpose-session-"
