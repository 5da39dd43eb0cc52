"""What any trained network needs: its masters, its optimizer, its schedule, its state."""

from __future__ import annotations

import math
from contextlib import ExitStack
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from razona.config.common import OptimizerConfig
from razona.errors import CheckpointError, ModelError
from razona.models.choose_scorer import choose_scorer
from razona.models.lora import Adapter, unwrap
from razona.models.master import follow, unfollow
from razona.models.multimodal import language_model, set_dtype, towers
from razona.models.readout import Scalar
from razona.models.scorer import Scorer

T = TypeVar("T", bound="Trainable")


class Trainable:
    """``model``, or the LoRA adapter of a `peft.PeftModel`, and a ``readout`` on it that replaces its head.

    ``precision``: with "bf16" the model computes with one bf16 copy of fp32 master weights; gradients
    accumulate in fp32, AdamW updates the masters, and the copy is refreshed in place, so that an engine that
    samples from the same module is never stale. With "fp32" or "pure_bf16" the model's own parameters are
    trained. A readout is in fp32 in any case. ``total_updates`` is where a linear or cosine schedule ends.
    Of a multimodal model the language model is trained; the other `towers` are frozen and keep their dtype.
    ``kernels`` as in `ModelConfig`. Whatever is done to the model is undone by `release`, or when this fails.
    """

    def __init__(
        self,
        model: Any,
        *,
        optimizer: OptimizerConfig,
        precision: str = "bf16",
        total_updates: int = 1,
        gradient_checkpointing: bool = False,
        readout: Scalar | None = None,
        kernels: str = "auto",
    ) -> None:
        model, self.adapter = unwrap(model)
        self.model = model
        self.config = optimizer
        self.precision = precision
        self.total_updates = total_updates
        self.gradient_checkpointing = gradient_checkpointing
        self.updates = 0
        with ExitStack() as undo:
            self.scorer = self._take(readout, kernels, undo)
            self.optimizer = torch.optim.AdamW(
                self.masters,
                lr=optimizer.learning_rate,
                betas=optimizer.betas,
                eps=optimizer.eps,
                weight_decay=optimizer.weight_decay,
                fused=True,
            )
            self._undo = undo.pop_all()

    def _take(self, readout: Scalar | None, kernels: str, undo: ExitStack) -> Scorer:
        """Makes the model ready; ``undo`` gets what gives it back."""
        model = self.model
        undo.callback(model.train, model.training)
        model.train()  # dropout is 0 everywhere; checkpointing needs train mode
        for parameter in (*towers(model).values(), *(_head_alone(model) if readout is not None else ())):
            if parameter.requires_grad:
                if self.precision == "bf16":  # as it was before the cast
                    undo.callback(setattr, parameter, "data", parameter.data)
                undo.callback(parameter.requires_grad_, True)
                parameter.requires_grad_(False)
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        own = {} if readout is None else dict(readout.to(model.device).named_parameters())
        if not named and not own:
            raise ModelError(_nothing_to_train(self.adapter))
        self.names = [*named, *own]
        self.compute: list[nn.Parameter] = [*named.values(), *own.values()]
        scorer = choose_scorer(model, kernels=kernels)
        undo.callback(scorer.release)
        self.masters: list[nn.Parameter] = self.compute
        if self.precision == "bf16":
            self.masters = [*self._split([*named.values()], undo), *own.values()]
        if self.precision == "pure_bf16":
            set_dtype(model, torch.bfloat16)
        if self.gradient_checkpointing:
            if not model.is_gradient_checkpointing:
                undo.callback(model.gradient_checkpointing_disable)
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return scorer

    def _split(self, parameters: list[nn.Parameter], undo: ExitStack) -> list[nn.Parameter]:
        """fp32 masters take over the present storage; the model goes on with a bf16 copy of it."""
        masters = [nn.Parameter(p.detach().float()) for p in parameters]
        for parameter, master in zip(parameters, masters, strict=True):
            undo.callback(_give_back, parameter, master)
        set_dtype(self.model, torch.bfloat16)
        for parameter, master in zip(parameters, masters, strict=True):
            undo.callback(unfollow, parameter, follow(parameter, master))
        return masters

    def release(self) -> None:
        """Gives the model back: its trained parameters are the masters from now on, in fp32, and all else is
        as transformers and peft made it. Not to be updated after. A second call does nothing.
        """
        self._undo.close()

    def __enter__(self: T) -> T:
        """Inside, it trains; then the model is given back, whatever happened."""
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    @property
    def device(self) -> torch.device:
        return self.compute[0].device

    def update(self) -> float:
        """One optimizer step on the accumulated gradients. Returns their norm before clipping.

        A norm of exactly 0 (nothing to learn from) or one that is not finite changes nothing: AdamW would go
        on by momentum alone, or be poisoned for good.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(self.updates)
        gradients = [p.grad for p in self.masters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if torch.isfinite(norm) and norm > 0:
            if self.config.max_grad_norm:
                torch.nn.utils.clip_grads_with_norm_(self.masters, self.config.max_grad_norm, norm)
            self.optimizer.step()
            self._refresh()
        if self.scorer.fast_path is not None:
            self.scorer.fast_path.forget()
        self.optimizer.zero_grad(set_to_none=True)
        self.updates += 1
        return norm.item()

    def learning_rate(self, done: int) -> float:
        """Of the update after ``done`` ones: linear warm-up, then the schedule."""
        config = self.config
        if done < config.warmup_steps:
            return config.learning_rate * (done + 1) / config.warmup_steps
        if config.schedule == "constant":
            return config.learning_rate
        left = 1.0 - (done - config.warmup_steps) / max(1, self.total_updates - config.warmup_steps)
        left = min(1.0, max(0.0, left))
        return config.learning_rate * (
            left if config.schedule == "linear" else 0.5 * (1 - math.cos(math.pi * left))
        )

    @torch.no_grad()
    def _refresh(self) -> None:
        if self.masters is not self.compute:
            torch._foreach_copy_(list(self.compute), list(self.masters))

    def state_dict(self) -> dict[str, Any]:
        """Masters, Adam's moments and the number of updates."""
        adam = self.optimizer.state_dict()["state"]
        return {
            "updates": self.updates,
            "weights": self.weights(),
            "adam": {name: adam[index] for index, name in enumerate(self.names) if index in adam},
        }

    def weights(self) -> dict[str, Tensor]:
        """The masters by name."""
        return {name: master.detach() for name, master in zip(self.names, self.masters, strict=True)}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        missing = set(self.names) ^ set(state["weights"])
        if missing:
            raise CheckpointError(
                f"the checkpoint's weights are not this model's: {sorted(missing)[:4]} stand in only one of "
                "the two. Resume with the model that the run was started with."
            )
        for name, master in zip(self.names, self.masters, strict=True):
            master.copy_(state["weights"][name])
        self._refresh()
        self.updates = state["updates"]
        adam = {index: state["adam"][name] for index, name in enumerate(self.names) if name in state["adam"]}
        self.optimizer.load_state_dict(
            {"state": adam, "param_groups": self.optimizer.state_dict()["param_groups"]}
        )


def _give_back(parameter: nn.Parameter, master: nn.Parameter) -> None:
    parameter.data = master.data


def _head_alone(model: Any) -> list[nn.Parameter]:
    """The parameters of the language-model head that are not the embedding's too."""
    trunk = {id(p) for p in language_model(model).base_model.parameters()}
    return [p for p in model.get_output_embeddings().parameters() if id(p) not in trunk]


def _nothing_to_train(adapter: Adapter | None) -> str:
    if adapter is None:
        return "the model has no trainable parameter: every requires_grad is False. Unfreeze some of them."
    return (
        f"the model's adapter '{adapter.name}' is frozen, and so is all the rest: PeftModel.from_pretrained "
        "loads an adapter for inference. Load it with is_trainable=True."
    )
