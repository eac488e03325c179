"""Updates that both front ends make in the same way."""

from __future__ import annotations
