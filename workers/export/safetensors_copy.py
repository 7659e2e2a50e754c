"""Copies the tensors of a pruned model between safetensors files."""

from __future__ import annotations
