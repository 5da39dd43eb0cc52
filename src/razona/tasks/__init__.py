"""Tasks: each owns its prompts, its reward and its evaluation."""
