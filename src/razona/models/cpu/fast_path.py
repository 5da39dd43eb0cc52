"""All that makes a CPU fast, behind one object. What uses it works without it too (``model.kernels``)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from razona.batch import Batch, FlatRow
from razona.models.cpu import llama
from razona.models.cpu.linear import patch_linears, patch_lora
from razona.models.cpu.prepacked import prepacked_linears
from razona.models.cpu.reuse import ActivationStore, BatchActivations, Recorder
from razona.models.cpu.rms_norm import patch_rms_norms
from razona.models.flat import FlatLayout
from razona.models.head import Head
from razona.types import Prompt, Sampling

PREPACK_FROM = 8  # decode steps from which on blocking the weights first is worth its time


class FastPath:
    """The fast kernels of one decoder ``text`` with its ``head``; until ``undo`` its modules run on them.

    It owns the hand-written forward pass (`razona.models.cpu.llama`), blocked weights for sampling, the LoRA
    in one product, the RMS norms, and what sampling saves for the training pass (`razona.models.cpu.reuse`).
    """

    def __init__(self, text: Any, head: Head, undo: ExitStack) -> None:
        self.text, self.head = text, head
        ours = type(text).__module__.startswith("transformers.models.")
        self.runs_by_hand = ours and text.config.model_type in llama.LLAMA_SHAPED
        self.activations = ActivationStore()
        self._decoder: llama.Decoder | None = None
        patch_rms_norms(text, undo)
        patch_lora(text, undo)
        patch_linears(nn.ModuleList([text, head.projection]), undo)

    @property
    def can_reuse_activations(self) -> bool:
        """Whether a training pass would compute the sampler's very bits, and can take them: bf16 on a CPU."""
        weight = self.head.projection.weight
        return self.runs_by_hand and weight.device.type == "cpu" and weight.dtype == torch.bfloat16

    @contextmanager
    def sampling(self, rows: int, steps: int) -> Iterator[None]:
        """Inside, up to ``rows`` tokens at a time go through for ``steps`` steps: on blocked weights, and
        with the modules looked up once."""
        used = nn.ModuleList([self.text, self.head.projection])
        in_bf16 = self.head.projection.weight.dtype == torch.bfloat16  # so are 4-bit layers then
        with ExitStack() as undo:
            if in_bf16 and steps >= PREPACK_FROM:
                undo.enter_context(prepacked_linears(used, rows, join=self.runs_by_hand))
            self._decoder = llama.Decoder(self.text) if self.runs_by_hand else None
            try:
                yield
            finally:
                self._decoder = None

    def hidden(
        self, tokens: Tensor, positions: Tensor, layout: llama.TokenLayout, recorder: Recorder | None
    ) -> Tensor:
        """Last hidden states ``[N, h]`` of tokens ``[N]`` without gradient, if it `runs_by_hand`."""
        return (self._decoder or llama.Decoder(self.text))(tokens, positions, layout, recorder)

    def saving(self, wanted: bool) -> AbstractContextManager[None]:
        """Inside, what is sampled is saved for a training pass, if that is ``wanted``."""
        return self.activations.saving(wanted)

    def forget(self) -> None:
        """The weights have changed: what was saved is no use any more."""
        self.activations.forget()

    def recorder(
        self, prompts: Sequence[Prompt], counts: Sequence[int], sampling: Sampling
    ) -> Recorder | None:
        """Saves what one wave of an engine computes; None where nothing is to be saved."""
        return self.activations.recorder(self.text, self.head, prompts, counts, sampling)

    def known(self, batch: Batch, *, temperature: float) -> BatchActivations | None:
        """What sampling has saved of all tokens of ``batch``, if it has."""
        return self.activations.of(batch, temperature=temperature)

    def replay(self, row: FlatRow, layout: FlatLayout, known: BatchActivations) -> Tensor:
        """Last hidden states ``[N, h]`` with gradient, from what is ``known``."""
        return llama.replay(self.text, row.token_ids[0], row.position_ids[0], layout, known.layers)
