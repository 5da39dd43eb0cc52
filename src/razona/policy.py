"""The owner of a language model's parameters and of their optimizer."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from razona.batch import Batch
from razona.config.common import OptimizerConfig
from razona.data.chat import tokenizer_of
from razona.errors import CheckpointError, ModelError
from razona.models.attention import use_plain_attention
from razona.models.lora import Adapter, unwrap
from razona.models.master import follow, unfollow
from razona.models.multimodal import set_dtype, towers
from razona.models.save import save
from razona.models.scorer import Scorer
from razona.models.wrap import wrap


class Policy:
    """The model that is trained: ``model``, or the LoRA adapter of a `peft.PeftModel`.

    ``precision``: with "bf16" the model computes with one bf16 copy of fp32 master weights; gradients
    accumulate in fp32, AdamW updates the masters, and the copy is refreshed in place, so that an engine that
    samples from the same module is never stale. With "fp32" or "pure_bf16" the model's own parameters are
    trained. ``total_updates`` is where a linear or cosine schedule ends. ``tokenizer`` may be a processor.
    Of a multimodal model the language model is trained; the other `towers` are frozen and keep their dtype.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        optimizer: OptimizerConfig,
        precision: str = "bf16",
        total_updates: int = 1,
        gradient_checkpointing: bool = False,
    ) -> None:
        model, self.adapter = unwrap(model)
        self.model = model.train()  # dropout is 0 everywhere; checkpointing needs train mode
        self.tokenizer, self.processor = tokenizer_of(tokenizer), tokenizer
        self.config = optimizer
        self.precision = precision
        self.total_updates = total_updates
        self.gradient_checkpointing = gradient_checkpointing
        self.updates = 0
        self._frozen = [p for p in towers(model).values() if p.requires_grad]
        for tower in self._frozen:
            tower.requires_grad_(False)
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not named:
            raise ModelError(_nothing_to_train(self.adapter))
        self.starts_at_its_base = self.adapter is not None and self.adapter.is_fresh
        self.names = list(named)
        self.compute: list[nn.Parameter] = list(named.values())
        self.scorer: Scorer = wrap(model)
        self._hooks: list[Any] = []
        self.masters: list[nn.Parameter] = self._split(model) if precision == "bf16" else self.compute
        if precision == "pure_bf16":
            set_dtype(model, torch.bfloat16)
        if gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.optimizer = torch.optim.AdamW(
            self.masters,
            lr=optimizer.learning_rate,
            betas=optimizer.betas,
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            fused=True,
        )

    def _split(self, model: Any) -> list[nn.Parameter]:
        """fp32 masters take over the present storage; the model goes on with a bf16 copy of it."""
        masters = [nn.Parameter(p.detach().float()) for p in self.compute]
        set_dtype(model, torch.bfloat16)
        for parameter, master in zip(self.compute, masters, strict=True):
            self._hooks.append(follow(parameter, master))
        return masters

    def release(self) -> None:
        """Gives the model back: its trained parameters are the masters from now on, in fp32, and whoever
        trains it next finds it untouched; it has transformers' own attention again. Not to be updated after.
        """
        for parameter, hook in zip(self.compute, self._hooks, strict=False):  # no hooks without masters
            unfollow(parameter, hook)
        for parameter, master in zip(self.compute, self.masters, strict=True):
            parameter.data = master.data
        for tower in self._frozen:
            tower.requires_grad_(True)
        use_plain_attention(self.model)

    @property
    def device(self) -> torch.device:
        return self.compute[0].device

    def logprobs(self, batch: Batch, *, temperature: float, token_stats: Tensor | None = None) -> Tensor:
        """Log-probs ``[B, T]`` of the trained tokens at ``temperature``, with gradient unless disabled;
        ``token_stats``: see `FlatScorer`.
        """
        result: Tensor = self.scorer(batch, temperature=temperature, token_stats=token_stats)
        return result

    def saving_activations(self, wanted: bool) -> AbstractContextManager[None]:
        """Inside, the engine keeps what it computes, as far as it is ``wanted`` and the training pass would
        compute the same bits: that pass then takes it (`razona.models.cpu.reuse`)."""
        if (
            not self.scorer.can_reuse_activations or self.gradient_checkpointing
        ):  # asked for where memory is short
            return nullcontext()
        return self.scorer.activations.saving(wanted)

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
        self.scorer.activations.forget()
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

    def reference(self, folder: Path, *, refresh_every: int = 0) -> Reference:
        """A frozen scorer of the policy as it is now: its base, where the adapter is still fresh, else its
        weights on disk in ``folder``."""
        return Reference(self, folder, refresh_every=refresh_every)

    def save(self, folder: Path) -> Path:
        """What was trained, with its tokenizer or processor: the whole model as it computes, or an adapter's
        folder with the fp32 masters."""
        if self.adapter is None:
            return save(self.model, self.processor, folder)
        return self.adapter.save(self.processor, folder, dict(zip(self.names, self.masters, strict=True)))

    @torch.no_grad()
    def _refresh(self) -> None:
        if self.masters is not self.compute:
            torch._foreach_copy_(list(self.compute), list(self.masters))

    def state_dict(self) -> dict[str, Any]:
        """Masters, Adam's moments and the number of updates."""
        adam = self.optimizer.state_dict()["state"]
        return {
            "updates": self.updates,
            "weights": {name: master.detach() for name, master in zip(self.names, self.masters, strict=True)},
            "adam": {name: adam[index] for index, name in enumerate(self.names) if index in adam},
        }

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


class Reference:
    """A frozen policy. Its weights stay on disk (memory-mapped) and stand in for the policy's only while it
    scores; for a policy that began with a fresh adapter, the adapter is off meanwhile. No second model in
    memory.

    Its file is the starting policy's, and a resumed run takes it as it stands. With ``refresh_every`` the
    file changes during the run, so it begins anew and its content is part of the checkpoints.
    """

    def __init__(self, policy: Policy, folder: Path, *, refresh_every: int = 0) -> None:
        self.policy = policy
        self.refresh_every = refresh_every
        self.path = folder / "reference.safetensors"
        self.is_base = policy.starts_at_its_base and not refresh_every
        if refresh_every or not (self.is_base or self.path.exists()):
            self.refresh()

    def refresh(self) -> None:
        """From now on the policy as it is at this moment (a hard copy, as DeepSeek-R1 does every 400 steps,
        arXiv 2501.12948).
        """
        named = zip(self.policy.names, self.policy.compute, strict=True)
        self._write({name: weight.detach().contiguous() for name, weight in named})

    def _write(self, weights: dict[str, Tensor]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(".partial")
        save_file(weights, temporary)
        temporary.rename(self.path)

    def state_dict(self) -> dict[str, Any]:
        return {"weights": load_file(self.path)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._write(state["weights"])

    @torch.no_grad()
    def logprobs(self, batch: Batch, *, temperature: float) -> Tensor:
        """As `Policy.logprobs`, under the frozen weights."""
        scorer = self.policy.scorer
        if self.is_base:
            assert self.policy.adapter is not None
            with self.policy.adapter.off():
                return self.policy.logprobs(batch, temperature=temperature)
        frozen = load_file(self.path, device=str(self.policy.device))
        parameters = {f"model.{name}": weight for name, weight in frozen.items()}
        result: Tensor = torch.func.functional_call(
            scorer, parameters, (batch,), {"temperature": temperature}
        )
        return result


def _nothing_to_train(adapter: Adapter | None) -> str:
    if adapter is None:
        return "the model has no trainable parameter: every requires_grad is False. Unfreeze some of them."
    return (
        f"the model's adapter '{adapter.name}' is frozen, and so is all the rest: PeftModel.from_pretrained "
        "loads an adapter for inference. Load it with is_trainable=True."
    )
