"""The configurations under TRL's names."""

from __future__ import annotations

from razona.config.check import validate
from razona.errors import ConfigError
from razona.trl import fields
from razona.trl.arguments import Arguments
from razona.trl.batch_sizes import check_batch
from razona.trl.translate import SFT_METRICS, grpo_config


class GRPOConfig(Arguments):
    """TRL's GRPOConfig, with the defaults of TRL 1.16.0. docs/from-trl.md says what becomes of each field.

    ``num_generations`` completions per prompt; ``per_device_train_batch_size`` counts completions.
    """

    TABLE = fields.GRPO
    BEST_METRIC = "eval_reward"

    def check(self) -> None:
        """As in TRL, before any model is loaded: batch sizes, and what the objective cannot do."""
        super().check()
        check_batch(self)
        _check_loss(self)
        validate(grpo_config(self, num_rows=10**9))  # the data are not known yet: no run is too short


class SFTConfig(Arguments):
    """TRL's SFTConfig, with the defaults of TRL 1.16.0. docs/from-trl.md says what becomes of each field."""

    TABLE = fields.SFT
    BEST_METRIC = "eval_loss"

    def check(self) -> None:
        super().check()
        metric = str(self.metric_for_best_model or self.BEST_METRIC)
        if metric.removeprefix("eval_") not in SFT_METRICS:
            raise ConfigError(
                f"metric_for_best_model = {metric!r} is none of 'eval_loss', 'eval_mean_token_accuracy', "
                "those that are measured."
            )


LOSSES = ("grpo", "dr_grpo", "dapo", "bnpo", "cispo")


def _check_loss(args: Arguments) -> None:
    if args.loss_type not in LOSSES:
        raise ConfigError(
            f"loss_type = {args.loss_type!r} is none of {', '.join(map(repr, LOSSES))}, those that are "
            "supported."
        )
    if args.loss_type == "bnpo" and args.gradient_accumulation_steps > 1:
        raise ConfigError(
            "loss_type = 'bnpo' averages over the tokens of each micro-batch, so it changes with "
            f"gradient_accumulation_steps = {args.gradient_accumulation_steps}. Take 'dapo', which averages "
            "over all tokens of the update."
        )
    if args.importance_sampling_level == "sequence" and args.loss_type != "grpo":
        raise ConfigError(
            f"importance_sampling_level = 'sequence' with loss_type = {args.loss_type!r}: GSPO has one term "
            "per completion, whatever its length. Set loss_type='grpo'."
        )
    high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    if args.loss_type == "cispo" and high <= 1:
        raise ConfigError(
            f"loss_type = 'cispo' with a largest weight of {high} (epsilon_high): every token would be "
            "weighted down alike. Set epsilon_high=5.0, ScaleRL's."
        )
    if args.delta is not None and (args.loss_type == "cispo" or args.importance_sampling_level == "sequence"):
        raise ConfigError(
            f"delta = {args.delta} bounds the ratio of a token, and this loss has none. Leave it out."
        )
    if args.sync_ref_model and (not args.beta or args.ref_model_mixup_alpha != 1.0):
        raise ConfigError(
            f"sync_ref_model=True with beta = {args.beta} and ref_model_mixup_alpha = "
            f"{args.ref_model_mixup_alpha}: the policy replaces the reference of a KL whole. Set beta above "
            "0 and ref_model_mixup_alpha=1.0."
        )
    if args.ref_model_mixup_alpha != 0.6 and not args.sync_ref_model:
        raise ConfigError(
            "ref_model_mixup_alpha does nothing without sync_ref_model=True. Set it, or leave both out."
        )
    if args.ref_model_sync_steps != 512 and not args.sync_ref_model:
        raise ConfigError(
            "ref_model_sync_steps does nothing without sync_ref_model=True. Set it, or leave both out."
        )
