"""GSM8K, grade-school word problems: rows have a ``question`` and an ``answer`` that ends in ``#### 72``.

The model is asked to think first and then to write the number alone; the rewards are those of the course:
1 point for the format, 2 for the right number. Cobbe et al. 2021, arXiv 2110.14168.
"""

from __future__ import annotations

HUB_ID = "openai/gsm8k:main"
SYSTEM = "Think inside <think>...</think>, then write only the number."
PROMPT_COLUMN = "question"
GOLD = "answer:after('####'):number"
REWARDS = ("format", "exact_answer")
REWARD_WEIGHTS = (1.0, 2.0)
