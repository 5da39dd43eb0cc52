"""Unsloth's names: `FastLanguageModel`, `FastModel`. Code changes its import line and nothing else.

docs/one-gpu.md says what becomes of every argument.
"""

from razona.unsloth.model import FastLanguageModel, FastModel, is_bfloat16_supported

__all__ = ["FastLanguageModel", "FastModel", "is_bfloat16_supported"]
