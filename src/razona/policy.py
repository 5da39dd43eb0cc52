"""The networks that are trained: a policy with its reference, a value model, a reward model."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from razona.batch import Batch
from razona.config.common import OptimizerConfig
from razona.data.chat import tokenizer_of
from razona.models.classifier import save_classifier
from razona.models.readout import Scalar
from razona.models.save import save
from razona.models.scorer import ScalarScorer
from razona.models.trainable import Trainable


class Policy(Trainable):
    """The language model that samples and is trained. ``tokenizer`` may be a processor."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        optimizer: OptimizerConfig,
        precision: str = "bf16",
        total_updates: int = 1,
        gradient_checkpointing: bool = False,
        kernels: str = "auto",
    ) -> None:
        super().__init__(
            model,
            optimizer=optimizer,
            precision=precision,
            total_updates=total_updates,
            gradient_checkpointing=gradient_checkpointing,
            kernels=kernels,
        )
        self.tokenizer, self.processor = tokenizer_of(tokenizer), tokenizer
        self.starts_at_its_base = self.adapter is not None and self.adapter.is_fresh

    def logprobs(self, batch: Batch, *, temperature: float, token_stats: Tensor | None = None) -> Tensor:
        """Log-probs ``[B, T]`` of the trained tokens at ``temperature``, with gradient unless disabled;
        ``token_stats``: see `FlatScorer`.
        """
        result: Tensor = self.scorer(batch, temperature=temperature, token_stats=token_stats)
        return result

    def saving_activations(self, wanted: bool) -> AbstractContextManager[None]:
        """Inside, the engine keeps what it computes, as far as it is ``wanted`` and the training pass would
        compute the same bits: that pass then takes it (`razona.models.cpu.reuse`)."""
        fast = self.scorer.fast_path
        return nullcontext() if fast is None or not self.reuses_activations else fast.saving(wanted)

    @property
    def reuses_activations(self) -> bool:
        """Whether a training pass can take what the engine has computed (`saving_activations`)."""
        fast = self.scorer.fast_path  # with gradient checkpointing memory is short
        return fast is not None and fast.can_reuse_activations and not self.gradient_checkpointing

    def reference(self, folder: Path, *, refresh_every: int = 0) -> Reference:
        """A frozen scorer of the policy as it is now: its base, where the adapter is still fresh, else its
        weights on disk in ``folder``."""
        return Reference(self, folder, refresh_every=refresh_every)

    def save(self, folder: Path) -> Path:
        """What was trained, with its tokenizer or processor: the whole model as it computes, or an adapter's
        folder with the fp32 masters."""
        if self.adapter is None:
            return save(self.model, self.processor, folder)
        return self.adapter.save(self.processor, folder, self.weights())


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


class ValueModel(Trainable):
    """A backbone that says one number per state: a critic.

    ``model`` is a causal language model, whose own head is not read, or a `peft.PeftModel` on one. ``score``
    is the head to start from, as `razona.models.classifier.from_classifier` finds it in a reward model; None
    makes a fresh one. The other parameters are `Trainable`'s.
    """

    def __init__(
        self,
        model: Any,
        *,
        optimizer: OptimizerConfig,
        precision: str = "bf16",
        total_updates: int = 1,
        gradient_checkpointing: bool = False,
        kernels: str = "auto",
        score: nn.Linear | None = None,
    ) -> None:
        readout = Scalar(model.get_output_embeddings().weight.shape[1], score=score)
        super().__init__(
            model,
            optimizer=optimizer,
            precision=precision,
            total_updates=total_updates,
            gradient_checkpointing=gradient_checkpointing,
            readout=readout,
            kernels=kernels,
        )
        self.network = ScalarScorer(self.scorer, readout)

    def values(self, batch: Batch) -> Tensor:
        """``[B, T]``: column t is the value of the state before completion token t, 0 where ``loss_mask`` is
        False. With gradient unless disabled.
        """
        result: Tensor = self.network(batch, per_token=True)
        return result

    def scores(self, batch: Batch) -> Tensor:
        """``[B]``, read at the last token of each sequence. With gradient unless disabled."""
        result: Tensor = self.network(batch, per_token=False)
        return result


class RewardModel(ValueModel):
    """A value model of whole sequences, saved for others to score with, the ``tokenizer`` with it."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        optimizer: OptimizerConfig,
        precision: str = "bf16",
        total_updates: int = 1,
        gradient_checkpointing: bool = False,
        kernels: str = "auto",
        score: nn.Linear | None = None,
    ) -> None:
        super().__init__(
            model,
            optimizer=optimizer,
            precision=precision,
            total_updates=total_updates,
            gradient_checkpointing=gradient_checkpointing,
            kernels=kernels,
            score=score,
        )
        self.tokenizer = tokenizer_of(tokenizer)

    def save(self, folder: Path) -> Path:
        """A folder that `AutoModelForSequenceClassification` loads; of a LoRA, one that `peft.PeftModel`
        loads on such a base. ModelError where transformers has no such class for the architecture.
        """
        if self.adapter is None:
            return save_classifier(self.model, self.network.readout.score, self.tokenizer, folder)
        return self.adapter.save(self.tokenizer, folder, self.weights())
