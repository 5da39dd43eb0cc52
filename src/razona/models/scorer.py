"""A language model as a scorer: batch in, log-probs ``[B, T]`` out. The one module that wrappers wrap.

`razona.models.wrap` decides, once and by trying it, whether a model can take the flat shared-prefix row; one
that cannot (recurrent mixers, attention that does not go through transformers' interface) runs full padded
rows.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from razona.batch import Batch
from razona.models.cpu import llama
from razona.models.cpu.linear import patch_linears, patch_lora
from razona.models.cpu.reuse import ActivationStore, Recorder
from razona.models.cpu.rms_norm import patch_rms_norms
from razona.models.flat import FlatLayout, Layout
from razona.models.head import Head
from razona.models.multimodal import language_model


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
        row = batch.flat()
        layout = FlatLayout(row, exact=self.exact)
        may_know = torch.is_grad_enabled() and token_stats is None
        known = self.activations.of(batch, temperature=temperature) if may_know else None
        if known is None:
            hidden = self.hidden(row.token_ids, row.position_ids, layout)
        else:
            text = language_model(self.model)
            hidden = llama.replay(text, row.token_ids[0], row.position_ids[0], layout, known.layers)
        stats = None if token_stats is None else torch.zeros(2, len(row.target), device=hidden.device)
        scored = self.head.logprobs(
            hidden[row.source], row.target, temperature=temperature, token_stats=stats, known=known
        )
        if token_stats is not None and stats is not None:
            token_stats[:, row.scored] = stats
        return torch.zeros(row.scored.shape, device=scored.device).masked_scatter(row.scored, scored)

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
        device = batch.token_ids.device
        rows = [
            torch.cat([torch.tensor(batch.prompts[group], device=device), batch.token_ids[index, :length]])
            for index, (group, length) in enumerate(zip(batch.group_of, batch.lengths, strict=True))
        ]
        tokens = pad_sequence(rows, batch_first=True)
        lengths = torch.tensor([len(row) for row in rows], device=device)
        attended = torch.arange(tokens.shape[1], device=device) < lengths[:, None]
        logits = self.model(tokens, attention_mask=attended.long(), use_cache=False).logits
        out = torch.zeros(batch.loss_mask.shape, device=device)
        picked = []
        for index, group in enumerate(batch.group_of):
            first, length = len(batch.prompts[group]), batch.lengths[index]
            own = (logits[index, first - 1 : first - 1 + length].float() / temperature).log_softmax(-1)
            target, trained = batch.token_ids[index, :length], batch.loss_mask[index, :length]
            picked.append(own.gather(1, target[:, None])[:, 0][trained])
            if token_stats is not None:
                likely = own.detach()
                token_stats[0, index, :length] = ((likely.argmax(-1) == target) & trained).float()
                token_stats[1, index, :length] = -(likely.exp() * likely).nansum(-1) * trained
        return out.masked_scatter(batch.loss_mask, torch.cat(picked))


Scorer = FlatScorer | FullRowScorer
