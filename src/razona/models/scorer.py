"""A language model as a scorer: batch in, log-probs ``[B, T]`` out. The one module that wrappers wrap.

`wrap` decides, once and by trying it, whether a model can take the flat shared-prefix row; one that cannot
(recurrent mixers, attention that does not go through transformers' interface) runs full padded rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from razona.batch import Batch
from razona.models import llama
from razona.models.flat import FlatLayout, Layout
from razona.models.head import Head
from razona.models.lean import lighten
from razona.models.linear import lighten_adapters
from razona.models.multimodal import language_model
from razona.models.quant import made_ready
from razona.models.recall import Recall, Recorder


class DecodingLayout(Layout, llama.TokenLayout, Protocol):
    """A layout for both ways a decode step can run."""


class FlatScorer(nn.Module):
    """Scores through the shared-prefix row."""

    shares_prefixes = True
    recall: Recall

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.head = Head.of(model)
        text = language_model(model)
        ours = type(text).__module__.startswith("transformers.models.")
        self.recall = Recall()
        self.lean = ours and text.config.model_type in llama.LLAMA_SHAPED
        lighten(text)
        lighten_adapters(text)

    def forward(self, batch: Batch, *, temperature: float = 1.0, notes: Tensor | None = None) -> Tensor:
        """Log-probs ``[B, T]`` of the trained tokens at ``temperature``, fp32, 0 where ``loss_mask`` is
        False.

        ``notes`` ``[2, B, T]``, where given, is filled at the trained tokens with whether each is the most
        probable one, 1 or 0, and with the entropy of the distribution it comes from, in nats.
        """
        row = batch.flat()
        layout = FlatLayout(row, exact=self.exact)
        may_know = torch.is_grad_enabled() and notes is None
        known = self.recall.of(batch, temperature=temperature) if may_know else None
        if known is None:
            hidden = self.hidden(row.token_ids, row.position_ids, layout)
        else:
            text = language_model(self.model)
            hidden = llama.replay(text, row.token_ids[0], row.position_ids[0], layout, known.layers)
        noted = None if notes is None else torch.zeros(2, len(row.target), device=hidden.device)
        scored = self.head.logprobs(
            hidden[row.source], row.target, temperature=temperature, notes=noted, known=known
        )
        if notes is not None and noted is not None:
            notes[:, row.scored] = noted
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
        if self.lean and not torch.is_grad_enabled():
            decoder = decoder or llama.Decoder(text)
            return decoder(token_ids.flatten(), position_ids.flatten(), layout, recorder)
        out = text.base_model(token_ids, position_ids=position_ids, use_cache=False, layout=layout)
        states: Tensor = out.last_hidden_state
        return states.reshape(-1, states.shape[-1])

    def decoder(self) -> llama.Decoder | None:
        """For `hidden`, as long as the model's modules stay what they are; None where transformers' own
        forward pass runs."""
        return llama.Decoder(language_model(self.model)) if self.lean else None

    @property
    def exact(self) -> bool:
        """Whether this pass reproduces the native engine bit for bit: bf16 on a CPU."""
        weight = self.head.projection.weight
        return weight.device.type == "cpu" and weight.dtype == torch.bfloat16

    @property
    def can_recall(self) -> bool:
        """Whether its training pass can take what the native engine has computed."""
        return self.lean and self.exact


class FullRowScorer(nn.Module):
    """Scores prompt + completion rows, padded on the right: for models that cannot share a prompt in one
    row.
    """

    shares_prefixes = False
    exact = False
    can_recall = False
    recall: Recall

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.recall = Recall()

    def forward(self, batch: Batch, *, temperature: float = 1.0, notes: Tensor | None = None) -> Tensor:
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
            if notes is not None:
                likely = own.detach()
                notes[0, index, :length] = ((likely.argmax(-1) == target) & trained).float()
                notes[1, index, :length] = -(likely.exp() * likely).nansum(-1) * trained
        return out.masked_scatter(batch.loss_mask, torch.cat(picked))


Scorer = FlatScorer | FullRowScorer


def wrap(model: Any) -> Scorer:
    """The fastest scorer that is right for this model: flat if a flat row of two completions agrees with full
    rows. Best asked while the model is in fp32, where agreement is sharp.
    """
    made_ready(type(model).__name__, model)
    full = FullRowScorer(model)
    text = language_model(model)
    if not getattr(text, "_supports_attention_backend", False):
        return full
    flat = FlatScorer(model)
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.arange(3, 27).remainder(vocabulary).reshape(2, 12).to(model.device)
    ids[:, 0] = ids[0, 0]
    probe = Batch(
        prompts=((1, 2, 3, 4, 5, 6),),
        kv_lengths=(0,),
        group_of=(0, 0),
        lengths=(12, 12),
        token_ids=ids,
        loss_mask=torch.ones_like(ids, dtype=torch.bool),
    )
    changed = ids.clone()
    changed[0] = ids[0].flip(0)
    neighbour_changed = replace(probe, token_ids=changed)
    original = text.config._attn_implementation
    with torch.no_grad(), eval_mode(model):
        with plain_attention(model):
            expected = full(probe)
        text.set_attn_implementation("razona")
        try:
            found, other = flat(probe), flat(neighbour_changed)
        except (TypeError, AttributeError, RuntimeError, ValueError):  # not our kind of model
            found = other = torch.full_like(expected, torch.nan)
    spread = expected.std().clamp(min=1e-3)
    difference = (found - expected).abs()
    if flat.head.projection.weight.dtype == torch.float32:
        # The largest difference, not the mean: a short convolution goes wrong on the first tokens alone.
        agrees = difference.max() < 2e-2 * spread
    else:  # single tokens of a trained model may differ by nats in bf16, and that means nothing
        agrees = difference.mean() < 0.3 * spread
    leaks = (found[1] - other[1]).abs().max() > 1e-2 * spread  # into a completion, from the one before it
    if agrees and not leaks:
        return flat
    text.set_attn_implementation(original)
    return full


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside, the former mode afterwards."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


@contextmanager
def plain_attention(model: Any) -> Iterator[None]:
    """transformers' own attention inside, for what does not bring a layout (`generate`, full rows)."""
    text = language_model(model)
    ours = use_plain_attention(model)
    try:
        yield
    finally:
        if ours:
            text.set_attn_implementation("razona")


def use_plain_attention(model: Any) -> bool:
    """From now on transformers' own attention; whether it had another."""
    text = language_model(model)
    ours: bool = text.config._attn_implementation == "razona"
    if ours:
        text.set_attn_implementation("sdpa" if text._supports_sdpa else "eager")
    return ours
