"""A language model as a backbone: batch in, hidden states out, or what a readout makes of them. The one
module that wrappers wrap.

`razona.models.wrap` decides, once and by trying it, whether a model can take the flat shared-prefix row; one
that cannot (recurrent mixers, attention that does not go through transformers' interface) runs full padded
rows.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from razona.batch import Batch, FlatRow, FullRows
from razona.models.cpu import llama
from razona.models.cpu.linear import patch_linears, patch_lora
from razona.models.cpu.reuse import ActivationStore, BatchActivations, Recorder
from razona.models.cpu.rms_norm import patch_rms_norms
from razona.models.flat import FlatLayout, Layout
from razona.models.head import Head
from razona.models.multimodal import language_model
from razona.models.readout import LogProbs, Scalar


class DecodingLayout(Layout, llama.TokenLayout, Protocol):
    """A layout for both ways a decode step can run."""


class FlatScorer(nn.Module):
    """Scores through the shared-prefix row."""

    shares_prefixes = True
    activations: ActivationStore

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.head = Head.of(model)
        text = language_model(model)
        ours = type(text).__module__.startswith("transformers.models.")
        self.activations = ActivationStore()
        self.runs_by_hand = ours and text.config.model_type in llama.LLAMA_SHAPED
        patch_rms_norms(text)
        patch_lora(text)
        patch_linears(model)

    def forward(self, batch: Batch, *, temperature: float = 1.0, token_stats: Tensor | None = None) -> Tensor:
        """Log-probs ``[B, T]`` of the trained tokens at ``temperature``, fp32, 0 where ``loss_mask`` is
        False.

        ``token_stats`` ``[2, B, T]``, where given, is filled at the trained tokens with whether each is the
        most probable one, 1 or 0, and with the entropy of the distribution it comes from, in nats.
        """
        may_know = torch.is_grad_enabled() and token_stats is None
        known = self.activations.of(batch, temperature=temperature) if may_know else None
        hidden, row = self.states(batch, known)
        return LogProbs(self.head)(hidden, row, temperature=temperature, token_stats=token_stats, known=known)

    def states(self, batch: Batch, known: BatchActivations | None = None) -> tuple[Tensor, FlatRow]:
        """Last hidden states ``[N, h]`` of the flat row, and the row: what a readout takes. Of what is
        ``known`` only the backward pass is left to do.
        """
        row = batch.flat()
        layout = FlatLayout(row, exact=self.exact)
        if known is None:
            return self.hidden(row.token_ids, row.position_ids, layout), row
        text = language_model(self.model)
        return llama.replay(text, row.token_ids[0], row.position_ids[0], layout, known.layers), row

    def hidden(
        self,
        token_ids: Tensor,
        position_ids: Tensor,
        layout: DecodingLayout,
        recorder: Recorder | None = None,
        decoder: llama.Decoder | None = None,
    ) -> Tensor:
        """Last hidden states ``[N, h]`` of a row ``[1, N]``, or ``[B, h]`` of one token per row ``[B, 1]``.
        One `decoder` may serve many passes.
        """
        text = language_model(self.model)
        if self.runs_by_hand and not torch.is_grad_enabled():
            decoder = decoder or llama.Decoder(text)
            return decoder(token_ids.flatten(), position_ids.flatten(), layout, recorder)
        out = text.base_model(token_ids, position_ids=position_ids, use_cache=False, layout=layout)
        states: Tensor = out.last_hidden_state
        return states.reshape(-1, states.shape[-1])

    def decoder(self) -> llama.Decoder | None:
        """For `hidden`, as long as the model's modules stay what they are; None where transformers' own
        forward pass runs."""
        return llama.Decoder(language_model(self.model)) if self.runs_by_hand else None

    @property
    def exact(self) -> bool:
        """Whether this pass reproduces the native engine bit for bit: bf16 on a CPU."""
        weight = self.head.projection.weight
        return weight.device.type == "cpu" and weight.dtype == torch.bfloat16

    @property
    def can_reuse_activations(self) -> bool:
        """Whether its training pass can take what the native engine has computed."""
        return self.runs_by_hand and self.exact


class FullRowScorer(nn.Module):
    """Scores prompt + completion rows, padded on the right: for models that cannot share a prompt in one
    row.
    """

    shares_prefixes = False
    exact = False
    can_reuse_activations = False
    activations: ActivationStore

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.activations = ActivationStore()

    def forward(self, batch: Batch, *, temperature: float = 1.0, token_stats: Tensor | None = None) -> Tensor:
        """As `FlatScorer.forward`."""
        rows = batch.full_rows()
        # The model's own logits: what it does between its states and them need not be known here.
        logits = self.model(rows.token_ids, attention_mask=rows.attended.long(), use_cache=False).logits
        logprobs = (logits.flatten(0, 1)[rows.source].float() / temperature).log_softmax(-1)
        scored = logprobs.gather(1, rows.target[:, None])[:, 0]
        if token_stats is not None:
            likely = logprobs.detach()
            token_stats[0, rows.scored] = (likely.argmax(-1) == rows.target).float()
            token_stats[1, rows.scored] = -(likely.exp() * likely).nansum(-1)
        return torch.zeros(rows.scored.shape, device=scored.device).masked_scatter(rows.scored, scored)

    def states(self, batch: Batch) -> tuple[Tensor, FullRows]:
        """Last hidden states ``[B * L, h]`` of the full padded rows, and the rows."""
        rows = batch.full_rows()
        text = language_model(self.model).base_model
        out = text(rows.token_ids, attention_mask=rows.attended.long(), use_cache=False)
        return out.last_hidden_state.flatten(0, 1), rows


Scorer = FlatScorer | FullRowScorer


class ScalarScorer(nn.Module):
    """A number per token or per sequence, read off a backbone's states. Of a value or reward model the one
    module that wrappers wrap.
    """

    def __init__(self, backbone: Scorer, readout: Scalar) -> None:
        super().__init__()
        self.backbone = backbone
        self.readout = readout

    def forward(self, batch: Batch, *, per_token: bool) -> Tensor:
        """fp32 values ``[B, T]``, 0 where ``loss_mask`` is False, or scores ``[B]``."""
        hidden, row = self.backbone.states(batch)
        return self.readout.values(hidden, row) if per_token else self.readout.scores(hidden, row)
