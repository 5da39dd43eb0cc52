"""Rows become prompts, and demonstrations with their masks."""

from razona.data.demonstrations import Demonstration, DemonstrationSet, build_demonstrations
from razona.data.gold import Gold, parse_gold, with_gold
from razona.data.output import output_file
from razona.data.prompts import PromptSet, build_prompts
from razona.data.rows import Rows, load_rows
from razona.data.source import PromptSource, first_of

__all__ = [
    "Demonstration",
    "DemonstrationSet",
    "Gold",
    "PromptSet",
    "PromptSource",
    "Rows",
    "build_demonstrations",
    "build_prompts",
    "first_of",
    "load_rows",
    "output_file",
    "parse_gold",
    "with_gold",
]
