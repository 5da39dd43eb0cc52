"""One forward pass instead of two: the trainer takes what the sampler computed.

On policy and in bf16 on a CPU, the training pass would compute the very bits that prefill and decode have
computed (`razona.models.flat`). So while it samples for training, the engine keeps what the backward pass
needs (`LayerActivations` of every layer, the derivatives of the log-probs), and the training pass is its
backward half alone. Valid until the weights change, once per completion, and as far as ``ACTIVATION_BYTES``
go: groups beyond are computed as usual.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from razona.batch import CPU_TOKENS, Batch, needed
from razona.models.cpu.llama import LayerActivations, can_replay
from razona.models.cpu.memory import reserved
from razona.models.head import CHUNK, Head
from razona.types import Prompt, Sampling

ACTIVATION_BYTES = 2 * 2**30
RESERVED = 1 if sys.platform == "win32" else 8
"""Times as much may be set aside and never touched, as most completions end before their room does; Windows
counts that as used."""
TOGETHER = 256
"""Rows, of all layers together, that wait to be written at once: many small writes take longer than a few."""


class ActivationStore:
    """What the sampler has saved since the weights last changed."""

    def __init__(self) -> None:
        self.is_on = False
        self.left = ACTIVATION_BYTES
        self.blocks: list[_Block] = []
        self.spare: list[_Memory] = []

    @contextmanager
    def saving(self, wanted: bool) -> Iterator[None]:
        """Inside, what is sampled is saved for a training pass, if that is ``wanted``."""
        self.is_on, self.left = wanted, ACTIVATION_BYTES
        try:
            yield
        finally:
            self.is_on = False

    def forget(self) -> None:
        """The weights have changed. The memory stays for the next step, since to get it anew takes longer
        than to write to it; but no more than could be used."""
        self.spare, left = [], ACTIVATION_BYTES
        for block in self.blocks:
            if block.memory is not None and block.memory.bytes <= left:
                self.spare.append(block.memory)
                left -= block.memory.bytes
            block.forget()
        self.blocks.clear()

    def recorder(
        self, model: Any, head: Head, prompts: Sequence[Prompt], counts: Sequence[int], sampling: Sampling
    ) -> Recorder | None:
        """For one wave of an engine: prompt p with ``counts[p]`` completions. None when nothing is to be
        saved: not wanted, no memory left, log-probs that are not those of the whole distribution."""
        whole = sampling.temperature > 0 and sampling.top_p == 1 and not sampling.top_k and not sampling.min_p
        if not (self.is_on and whole and can_replay(model)):
            if not self.is_on:  # an evaluation, say: it can use the memory
                self.spare.clear()
            return None
        shape = _Shape.of(model, head)
        room = RESERVED * self.left // shape.token_bytes
        blocks: list[_Block] = []
        for prompt, count in zip(prompts, counts, strict=True):
            group = GroupActivations(
                len(prompt.token_ids), sampling.max_completion_length, count, sampling.temperature
            )
            room -= group.tokens
            if room < 0:
                break
            if not blocks or blocks[-1].tokens + group.tokens > CPU_TOKENS:
                blocks.append(_Block(shape))
            blocks[-1].add(group)
        if not blocks:
            return None
        with torch.inference_mode(False):  # an engine's own mode makes tensors that autograd does not take
            for block in blocks:
                fits = (index for index, memory in enumerate(self.spare) if memory.tokens >= block.tokens)
                index = next(fits, None)
                room = max(block.tokens, CPU_TOKENS)
                block.memory = _Memory(shape, room) if index is None else self.spare.pop(index)
        self.blocks += blocks
        return Recorder(self, blocks, head)

    def of(self, batch: Batch, *, temperature: float) -> BatchActivations | None:
        """What was saved of all tokens of ``batch``, for its one training pass; None if that is not there."""
        sampled = batch.sampled
        if sampled is None or any(group is None for group in sampled.activations):
            return None
        groups: list[GroupActivations] = list(sampled.activations)
        rows = [(groups[g], member) for g, member in zip(batch.group_of, sampled.members, strict=True)]
        usable = all(g.is_valid and g.temperature == temperature and m not in g.taken for g, m in rows)
        runs = [block for block, _ in groupby(group.block for group in groups)]
        if not usable or len(runs) > len(set(runs)):  # a block comes twice: nothing makes such a batch
            return None
        for group, member in rows:
            group.taken.add(member)
        return BatchActivations(groups, rows, batch)


@dataclass(frozen=True)
class _Shape:
    """What one token takes."""

    widths: tuple[int, ...]  # of `LayerActivations`
    layers: int
    hidden: int
    derivatives: int  # numbers a log-prob's derivative has, see `Head.is_frozen`
    dtype: torch.dtype

    @classmethod
    def of(cls, model: Any, head: Head) -> _Shape:
        config, attn = model.config, model.base_model.layers[0].self_attn
        heads, hidden = config.num_attention_heads * attn.head_dim, config.hidden_size
        widths, weight = (hidden, heads, hidden, 2 * config.intermediate_size), head.projection.weight
        derivatives = hidden if head.is_frozen else len(weight)
        return cls(widths, config.num_hidden_layers, hidden, derivatives, weight.dtype)

    @property
    def token_bytes(self) -> int:
        return (self.layers * sum(self.widths) + self.hidden + self.derivatives) * self.dtype.itemsize


@dataclass(eq=False)
class GroupActivations:
    """Where a group lies in its block: its prompt from ``start``, then completion after completion."""

    prompt_length: int
    stride: int
    count: int
    temperature: float
    start: int = 0
    block: _Block | None = None
    taken: set[int] = field(default_factory=set)  # completions that have had their pass

    @property
    def is_valid(self) -> bool:
        """Whether the weights are still those it was sampled with, and its memory is there."""
        return self.block is not None

    @property
    def tokens(self) -> int:
        return self.prompt_length + self.count * self.stride

    def first(self, member: int) -> int:
        """Where completion ``member`` begins."""
        return self.start + self.prompt_length + member * self.stride


class _Memory:
    """Room for tokens: what every layer has `LayerActivations` of them, the last layer's output, the
    derivatives of their log-probs."""

    def __init__(self, shape: _Shape, tokens: int) -> None:
        def room(layers: int, width: int) -> Tensor:
            return reserved(layers, tokens, width, dtype=shape.dtype)

        self.tokens, self.bytes = tokens, tokens * shape.token_bytes
        self.saved = [room(shape.layers, width) for width in shape.widths]
        self.last = room(1, shape.hidden)
        self.derivatives = room(1, shape.derivatives)


class _Block:
    """A few groups, about as many as a micro-batch has, and the memory of their tokens."""

    def __init__(self, shape: _Shape) -> None:
        self.shape = shape
        self.groups: list[GroupActivations] = []
        self.tokens = 0
        self.memory: _Memory | None = None

    def add(self, group: GroupActivations) -> None:
        group.block, group.start = self, self.tokens
        self.groups.append(group)
        self.tokens += group.tokens

    def forget(self) -> None:
        self.memory = None
        for group in self.groups:
            group.block = None


class Recorder:
    """Keeps what a wave computes. `prompts` and `step` say what the next pass is over."""

    def __init__(self, store: ActivationStore, blocks: Sequence[_Block], head: Head) -> None:
        self.store, self.blocks = store, list(blocks)
        self.waiting = _Waiting(head) if head.is_frozen else None
        self.groups = [group for block in blocks for group in block.groups]
        self.used = [sum(group.prompt_length for group in block.groups) for block in blocks]  # tokens
        rows = [(i, t.first(m)) for i, b in enumerate(blocks) for t in b.groups for m in range(t.count)]
        self.block_of, self.first_of = torch.tensor(rows).unbind(1)
        self.places: list[_Places] = []
        self.layers: list[LayerActivations] = []  # on their way, the first being layer `self.done`
        self.done = 0

    def prompts(self) -> None:
        """The next pass is over all prompts, one prompt after the other."""
        self.places, done = [], 0
        for block in self.blocks:
            own = [torch.arange(group.prompt_length) + group.start for group in block.groups]
            count = sum(map(len, own))
            self.places.append(_Places(block, slice(done, done + count), torch.cat(own)))
            done += count

    def step(self, rows: Tensor, step: int) -> None:
        """The next pass is over token ``step`` of the wave's ``rows``."""
        known = rows < len(self.block_of)
        owner = torch.where(known, self.block_of[rows.where(known, 0)], -1)
        self.places = []
        for index, block in enumerate(self.blocks):
            own = (owner == index).nonzero()[:, 0]
            if len(own):
                at = self.first_of[rows[own]] + step
                self.places.append(_Places(block, as_slice(own), at))

    def count(self) -> None:
        """Counts the tokens of the next pass as used, and gives the last blocks up where room is short."""
        for index, block in enumerate(self.blocks):
            self.used[index] += sum(len(place.at) for place in self.places if place.block is block)
        while self.blocks and sum(self.used) * self.blocks[0].shape.token_bytes > self.store.left:
            lost = self.blocks.pop()
            lost.forget()
            self.used.pop()
            self.places = [place for place in self.places if place.block is not lost]

    def put(self, saved: LayerActivations) -> None:
        """The next layer's."""
        self.layers.append(saved)
        if len(self.layers) * len(saved.x) >= TOGETHER:
            self._write()

    def put_last(self, x: Tensor) -> None:
        self._write()
        self.done = 0
        for place in self.places:
            place.put(needed(place.block.memory).last, x[None])

    def _write(self) -> None:
        layers = slice(self.done, self.done + len(self.layers))
        for kind, values in enumerate(zip(*self.layers, strict=True) if self.places else ()):
            together = torch.cat(values).view(len(values), *values[0].shape)
            for place in self.places:
                place.put(needed(place.block.memory).saved[kind][layers], together)
        self.done = layers.stop
        self.layers.clear()

    def put_derivatives(self, derivatives: Tensor) -> None:
        """Of the log-probs of the tokens drawn, with respect to the raw logits ``[n, V]``."""
        if self.waiting is not None:
            return self.waiting.add(self.places, derivatives)
        for place in self.places:
            place.put(needed(place.block.memory).derivatives, derivatives[None])

    def close(self, lengths: Sequence[int]) -> list[GroupActivations]:
        """The wave's rows have ended with ``lengths`` tokens. Returns the groups of its first prompts; the
        others have none."""
        if self.waiting is not None:
            self.waiting.multiply()
        ends = self.first_of + torch.tensor(lengths[: len(self.first_of)]) - 1
        for index, block in enumerate(self.blocks):  # the last tokens were never fed: nobody sees them
            own, memory = ends[self.block_of == index], needed(block.memory)
            for room in (*memory.saved, memory.last):
                room.index_fill_(1, own, 0.0)
        if self.blocks:
            self.store.left -= sum(self.used) * self.blocks[0].shape.token_bytes
        return self.groups


@dataclass(frozen=True)
class _Places:
    """Which rows of a pass belong to a block, and where in it."""

    block: _Block
    own: Tensor | slice
    at: Tensor

    def put(self, memory: Tensor, values: Tensor) -> None:
        """From ``[layers, n, width]`` to ``[layers, tokens, width]``."""
        layers, tokens, width = memory.shape
        if len(self.at) < values.shape[1]:
            values = values[:, self.own]
        lines = (torch.arange(layers)[:, None] * tokens + self.at).flatten()
        memory.view(-1, width).index_copy_(0, lines, values.reshape(-1, width))  # dimension 1 is slower

    def moved(self, by: int) -> _Places:
        """The same places of rows that lie ``by`` farther on."""
        first = self.own
        own = slice(first.start + by, first.stop + by) if isinstance(first, slice) else first + by
        return replace(self, own=own)


class _Waiting:
    """Derivatives of log-probs with respect to raw logits ``[n, V]``, on their way to those with respect to
    the last hidden states ``[n, h]``: a frozen head's weight is all that lies between, and multiplies many
    rows at a time."""

    def __init__(self, head: Head) -> None:
        self.weight = head.projection.weight
        self.rows = self.weight.new_empty(0, len(self.weight))
        self.count = 0
        self.places: list[_Places] = []

    def add(self, places: Sequence[_Places], derivatives: Tensor) -> None:
        new = len(derivatives)
        if self.count + new > len(self.rows):
            self.multiply()
        if new > len(self.rows):
            self.rows = self.weight.new_empty(max(CHUNK, new), len(self.weight))
        self.rows[self.count : self.count + new] = derivatives
        self.places += [place.moved(self.count) for place in places]
        self.count += new

    def multiply(self) -> None:
        if self.places:
            products = self.rows[: self.count] @ self.weight
            for place in self.places:
                if place.block.memory is not None:  # not given up meanwhile
                    place.put(place.block.memory.derivatives, products[None])
        self.count, self.places = 0, []


class BatchActivations:
    """What was saved of the tokens of one micro-batch, in the order of its flat row."""

    def __init__(
        self, groups: Sequence[GroupActivations], rows: Sequence[tuple[GroupActivations, int]], batch: Batch
    ) -> None:
        self.blocks = list(dict.fromkeys(needed(group.block) for group in groups))
        self.memories = [needed(block.memory) for block in self.blocks]
        self.tokens: list[Tensor | slice] = []
        self.scored: list[Tensor | slice] = []
        steps = torch.arange(batch.token_ids.shape[1])
        for block in self.blocks:
            tokens, scored = [], []
            for group in (group for group in groups if group.block is block):
                tokens.append(torch.arange(group.prompt_length) + group.start)
                for row, (owner, member) in enumerate(rows):
                    if owner is group:
                        first = group.first(member)
                        tokens.append(torch.arange(batch.lengths[row]) + first)
                        scored.append(steps[batch.loss_mask[row]] + first)
            self.tokens.append(as_slice(torch.cat(tokens)))
            self.scored.append(as_slice(torch.cat(scored)))
        self.logprobs = batch.sampler_logprobs[batch.loss_mask]

    @property
    def layers(self) -> list[tuple[LayerSource, Tensor]]:
        """For every layer what it saved, and its output."""
        count = self.blocks[0].shape.layers
        outs = [self.saved(0, layer) for layer in range(1, count)]  # the next one's input
        outs.append(self._gather([m.last[0] for m in self.memories], self.tokens))
        return [(LayerSource(self, layer), out) for layer, out in enumerate(outs)]

    def saved(self, kind: int, layer: int) -> Tensor:
        return self._gather([m.saved[kind][layer] for m in self.memories], self.tokens)

    def derivatives(self) -> Tensor:
        """Of the scored tokens' log-probs, see `razona.models.head.Known`."""
        return self._gather([m.derivatives[0] for m in self.memories], self.scored)

    def _gather(self, memory: Sequence[Tensor], places: Sequence[Tensor | slice]) -> Tensor:
        parts = [room[own] for room, own in zip(memory, places, strict=True)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class LayerSource:
    """`razona.models.cpu.llama.Source` of one layer."""

    def __init__(self, batch: BatchActivations, layer: int) -> None:
        self.batch, self.layer = batch, layer

    def get(self) -> LayerActivations:
        kinds = range(len(LayerActivations._fields))
        return LayerActivations(*(self.batch.saved(kind, self.layer) for kind in kinds))


def as_slice(places: Tensor) -> Tensor | slice:
    """A slice where the places follow each other: taking it copies nothing."""
    first = int(places[0])
    if torch.equal(places, torch.arange(first, first + len(places))):
        return slice(first, first + len(places))
    return places
