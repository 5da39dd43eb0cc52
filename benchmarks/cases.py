"""The cases of the GRPO benchmark. Standard library only: every party's interpreter reads this file."""

from __future__ import annotations

from dataclasses import dataclass

QUESTIONS = (
    "A farmer has 17 sheep and buys 25 more. How many sheep does the farmer have now?",
    "A train leaves at 9 in the morning and arrives at 2 in the afternoon. How long is the ride?",
    "A baker sells 12 loaves in the morning and 31 in the evening. How many loaves are sold?",
    "A book has 240 pages and a reader finishes 30 pages a day. After how many days is it read?",
)

LORA_ALPHA = 32


@dataclass(frozen=True)
class Case:
    """One step's work: P prompts, G completions of each, all of exactly `length` tokens."""

    questions: tuple[str, ...]
    group_size: int
    length: int

    @property
    def prompts(self) -> list[list[dict[str, str]]]:
        """As messages; the chat template makes about 56 tokens of each."""
        return [[{"role": "user", "content": question}] for question in self.questions]


CASES = {
    "G=4x48": Case(QUESTIONS[:1], group_size=4, length=48),
    "G=8x128": Case(QUESTIONS[:1], group_size=8, length=128),
    "4xG=8x128": Case(QUESTIONS, group_size=8, length=128),
}


def reward(completions: list[str]) -> list[float]:
    """Mean character code of each completion: cheap, and never the group's mean, so no row can be skipped."""
    return [sum(map(ord, text)) / max(1, len(text)) for text in completions]
