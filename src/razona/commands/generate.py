"""`razona generate`: completions for prompts from the command line or a data set."""

from __future__ import annotations

from typing import Any

from razona.build.data import fitting_prompts, load_table
from razona.build.model import load_model, make_engine, make_policy
from razona.config import OptimizerConfig
from razona.config.check import validate
from razona.config.commands import GenerateConfig
from razona.data import first_of, load_rows, output_file
from razona.errors import ConfigError
from razona.rollout.collect import completion_seeds
from razona.run.console import Console, prompt_text
from razona.run.folder import json_line
from razona.tasks import with_task


def run(config: GenerateConfig, *, console: Console, rows: Any = None) -> dict[str, Any]:
    """Samples ``sampling.group_size`` completions per prompt; prints them or writes them to
    ``config.output``.

    Prompts given as text are put to a chat model as what the user says. ``rows`` stand in for
    ``config.data.path``. Raises ConfigError before the model is loaded where the output cannot be written.
    """
    config = with_task(config)
    validate(config)
    if config.prompts and rows is not None:
        raise ConfigError("prompts and rows are both given, and one would be left out. Give one of them.")
    output = output_file(config.output)
    loaded = load_model(config.model, console)
    if config.prompts:
        chat = bool(loaded.tokenizer.chat_template)
        texts = [[{"role": "user", "content": text}] if chat else text for text in config.prompts]
        table = load_rows([{config.data.prompt_column: text} for text in texts])
    else:
        table = load_table(config.data.path if rows is None else rows, config.data, console)
    fitting = fitting_prompts(table, loaded, config.data, config.sampling, console)
    prompts = first_of(fitting, config.num_prompts, seed=config.seed, shuffle=config.data.shuffle)
    policy = make_policy(loaded, config.model, OptimizerConfig(), total_updates=1)
    engine = make_engine(policy, loaded, console, config.sampling.engine)
    seeds = completion_seeds(prompts, config.sampling.group_size, seed=config.seed, step=0)
    groups = engine.generate(prompts, config.sampling, seeds=seeds)
    records: list[dict[str, Any]] = [
        {
            "prompt_id": group.prompt.id,
            "prompt": group.prompt.input,
            "completion": completion.text,
            "finish_reason": completion.finish_reason,
            "n_tokens": len(completion.token_ids),
        }
        for group in groups
        for completion in group.completions
    ]
    if output is not None:
        output.write_bytes(b"".join(map(json_line, records)))
        console.print(f"{len(records)} completions are in {output}")
    else:
        for record in records:
            cut = " [cut off]" if record["finish_reason"] == "length" else ""
            console.print(f"\n>>> {prompt_text(record['prompt'])}", style="bold")
            console.print(record["completion"] + cut)
    return {"model": config.model.name, "completions": records}
