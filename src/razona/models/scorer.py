"""A language model as a backbone: batch in, hidden states out, or what a readout makes of them. The one
module that wrappers wrap.

`razona.models.choose_scorer` decides, once and by trying it, whether a model can take the flat shared-prefix
row; one that cannot (recurrent mixers, attention that does not go through transformers' interface) runs full
padded rows.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from razona.batch import Batch, FlatRow, FullRows
from razona.errors import ModelError
from razona.models.attention import use_layout_attention
from razona.models.cpu.fast_path import FastPath
from razona.models.cpu.llama import TokenLayout
from razona.models.cpu.reuse import BatchActivations, Recorder
from razona.models.flat import FlatLayout, Layout
from razona.models.head import Head
from razona.models.multimodal import language_model
from razona.models.readout import LogProbs, Scalar


class DecodingLayout(Layout, TokenLayout, Protocol):
    """A layout for both ways a decode step can run."""


class FlatScorer(nn.Module):
    """Scores through the shared-prefix row. Until `release` the model has razona's attention, and with
    ``kernels`` "auto" what `FastPath` patches; "plain" leaves its modules alone. ``notices`` are for users.
    """

    shares_prefixes = True

    def __init__(self, model: Any, *, kernels: str = "auto") -> None:
        super().__init__()
        self.model = model
        self.head = Head.of(model)
        self.notices: list[str] = []
        text = language_model(model)
        self.position_limit = position_limit(text.config)
        with ExitStack() as undo:
            use_layout_attention(model, undo)
            self.fast_path = FastPath(text, self.head, undo) if kernels == "auto" else None
            self._undo = undo.pop_all()

    def release(self) -> None:
        """Leaves the model's modules as they were. Not to be used after."""
        self._undo.close()

    def on_release(self, undo: Callable[..., object], *arguments: object) -> None:
        """`release` does this too."""
        self._undo.callback(undo, *arguments)

    def forward(self, batch: Batch, *, temperature: float = 1.0, token_stats: Tensor | None = None) -> Tensor:
        """Log-probs ``[B, T]`` of the trained tokens at ``temperature``, fp32, 0 where ``loss_mask`` is
        False.

        ``token_stats`` ``[2, B, T]``, where given, is filled at the trained tokens with whether each is the
        most probable one, 1 or 0, and with the entropy of the distribution it comes from, in nats.
        """
        fast, known = self.fast_path, None
        if fast is not None and torch.is_grad_enabled() and token_stats is None:
            known = fast.known(batch, temperature=temperature)
        hidden, row = self.states(batch, known)
        return LogProbs(self.head)(hidden, row, temperature=temperature, token_stats=token_stats, known=known)

    def states(self, batch: Batch, known: BatchActivations | None = None) -> tuple[Tensor, FlatRow]:
        """Last hidden states ``[N, h]`` of the flat row, and the row: what a readout takes. Of what is
        ``known`` only the backward pass is left to do.
        """
        row = batch.flat()
        layout = FlatLayout(row, exact=self.exact)
        if known is None or self.fast_path is None:
            return self.hidden(row.token_ids, row.position_ids, layout), row
        return self.fast_path.replay(row, layout, known), row

    def hidden(
        self,
        token_ids: Tensor,
        position_ids: Tensor,
        layout: DecodingLayout,
        recorder: Recorder | None = None,
    ) -> Tensor:
        """Last hidden states ``[N, h]`` of a row ``[1, N]``, or ``[B, h]`` of one token per row ``[B, 1]``.

        Raises ModelError beyond the positions up to which the model turns each by an angle of its own.
        """
        if self.position_limit is not None:
            check_positions(position_ids, self.position_limit)
        fast = self.fast_path
        if fast is not None and fast.runs_by_hand and not torch.is_grad_enabled():
            return fast.hidden(token_ids.flatten(), position_ids.flatten(), layout, recorder)
        text = language_model(self.model)
        out = text.base_model(token_ids, position_ids=position_ids, use_cache=False, layout=layout)
        states: Tensor = out.last_hidden_state
        return states.reshape(-1, states.shape[-1])

    @property
    def exact(self) -> bool:
        """Whether this pass reproduces the native engine bit for bit: bf16 on a CPU."""
        weight = self.head.projection.weight
        return weight.device.type == "cpu" and weight.dtype == torch.bfloat16


class FullRowScorer(nn.Module):
    """Scores prompt + completion rows, padded on the right: for models that cannot share a prompt in one
    row. ``why`` says what kept the model from it.
    """

    shares_prefixes = False
    exact = False
    fast_path = None

    def __init__(self, model: Any, *, why: str = "") -> None:
        super().__init__()
        self.model = model
        self.why = why
        self.notices: list[str] = []
        self.position_limit = position_limit(language_model(model).config)
        self._undo = ExitStack()

    def release(self) -> None:
        """As `FlatScorer.release`."""
        self._undo.close()

    def on_release(self, undo: Callable[..., object], *arguments: object) -> None:
        """As `FlatScorer.on_release`."""
        self._undo.callback(undo, *arguments)

    def forward(self, batch: Batch, *, temperature: float = 1.0, token_stats: Tensor | None = None) -> Tensor:
        """As `FlatScorer.forward`."""
        rows = batch.full_rows()
        self._check(rows)
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
        self._check(rows)
        text = language_model(self.model).base_model
        out = text(rows.token_ids, attention_mask=rows.attended.long(), use_cache=False)
        return out.last_hidden_state.flatten(0, 1), rows

    def _check(self, rows: FullRows) -> None:
        if self.position_limit is not None:
            check_positions(torch.tensor(rows.token_ids.shape[1] - 1), self.position_limit)


Scorer = FlatScorer | FullRowScorer


def position_limit(config: Any) -> int | None:
    """Positions up to which a rotary embedding turns each by an angle of its own.

    With longrope and dynamic scaling, one sequence beyond them changes the angles of all that stand beside
    it in a pass, and those of its own first tokens. None where there is no such limit.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    found = [kind for kind in kinds if kind.get("rope_type") in ("longrope", "dynamic")]
    longest = getattr(config, "max_position_embeddings", None)
    limits = [kind.get("original_max_position_embeddings") or longest for kind in found]
    return min((limit for limit in limits if limit), default=None)


def check_positions(positions: Tensor, limit: int) -> None:
    """Raises ModelError for a position that is beyond `position_limit`."""
    length = int(positions.max()) + 1
    if length > limit:
        raise ModelError(
            f"a sequence of {length} tokens, and beyond {limit} this model (longrope or dynamic scaling of "
            "its positions) turns every token otherwise, those of shorter sequences in the same pass too. "
            f"Keep prompt and completion together within {limit} tokens."
        )


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
