"""What the configurations under TRL's names share: any field by keyword, checked as soon as it is set."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

from razona.errors import ConfigError
from razona.trl import fields
from razona.trl.fields import Field


class Arguments:
    """What both have. A field is set in the constructor or later; a wrong one is a ConfigError at once."""

    TABLE: ClassVar[dict[str, Field]]
    BEST_METRIC: ClassVar[str]
    """What the best model is chosen by where only load_best_model_at_end is set."""

    def __init__(self, output_dir: str | None = None, **given: Any) -> None:
        for name, field in self.TABLE.items():
            self.__dict__[name] = copy.copy(field.default)
        for name, value in {"output_dir": output_dir, **given}.items():
            setattr(self, name, value)
        own = self.__dict__
        own["output_dir"] = str(output_dir or "trainer_output")
        own["bf16"] = True if own["bf16"] is None else own["bf16"]
        if own["metric_for_best_model"] is None and own["load_best_model_at_end"]:
            own["metric_for_best_model"] = self.BEST_METRIC
        if own["metric_for_best_model"] is not None and own["greater_is_better"] is None:
            own["greater_is_better"] = self.higher_is_better
        self.check()

    def __getattr__(self, name: str) -> Any:  # for the type checker: the fields stand in __dict__
        raise AttributeError(f"{type(self).__name__} has no field '{name}'")

    def __setattr__(self, name: str, value: Any) -> None:
        fields.check_field(self.TABLE, type(self).__name__, name, value)
        self.__dict__[name] = value

    def __repr__(self) -> str:
        default = {**{name: field.default for name, field in self.TABLE.items()}, "bf16": True}
        given = (f"{name}={value!r}" for name, value in self.to_dict().items() if value != default[name])
        return f"{type(self).__name__}({', '.join(given)})"

    def to_dict(self) -> dict[str, Any]:
        """Every field by name; a token is not shown."""
        return {**self.__dict__, "hub_token": self.hub_token and "<HUB_TOKEN>"}

    @property
    def higher_is_better(self) -> bool:
        """Of ``metric_for_best_model``: every figure but a loss."""
        return self.metric_for_best_model not in ("loss", "eval_loss")

    def check(self) -> None:
        """ConfigError for what cannot work together."""
        if self.greater_is_better not in (None, self.higher_is_better):
            which = "highest" if self.higher_is_better else "lowest"
            raise ConfigError(
                f"greater_is_better={self.greater_is_better} with metric_for_best_model="
                f"{self.metric_for_best_model!r}: the best model is the one with the {which} value. Leave "
                "greater_is_better out."
            )
        for name, known in CHOICES.items():
            if name in self.TABLE and getattr(self, name) not in known:
                raise ConfigError(
                    f"{name} = {getattr(self, name)!r} is none of {', '.join(map(repr, known))}, those that "
                    "are supported."
                )


CHOICES: dict[str, tuple[Any, ...]] = {
    "lr_scheduler_type": ("linear", "cosine", "constant", "constant_with_warmup"),
    "optim": ("adamw_torch_fused", "adamw_torch"),
    "logging_strategy": ("steps", "epoch", "no"),
    "eval_strategy": ("steps", "epoch", "no"),
    "save_strategy": ("steps", "epoch", "no"),
    "scale_rewards": ("group", "batch", "none", True, False),
    "importance_sampling_level": ("token", "sequence"),
    "train_sampling_strategy": ("random", "sequential"),
}
"""Values that are honoured. An enum of transformers equals its text."""
