"""The rollout engine: samples from the trainer's own module, so there is no second copy, no sync and no
staleness.

A prompt is prefilled once for all its completions, keys and values are written in place, finished rows leave
the batch, one uniform per row draws the next token. In bf16 on a CPU the recorded log-probs can equal the
trainer's flat pass bit for bit (the conditions are told in `razona.models.flat`); `NativeEngine.exactness`
says whether they do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, cached_property
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from razona.batch import FlatRow, Span
from razona.engines.exactness import measure
from razona.engines.sampling import draw, uniforms
from razona.errors import ModelError
from razona.models.cpu.reuse import Recorder
from razona.models.flat import (
    MIN_QUERY_ROWS,
    AttentionOptions,
    FlatLayout,
    attention,
    padded_length,
    sufficient_length,
)
from razona.models.scorer import FlatScorer
from razona.types import Completion, Group, Prompt, Sampling

SAMPLE_TILE = 8  # rows whose logits are worked on at a time, to stay in the processor's cache
KV_BYTES = 2**29  # keys and values held at once; more rows than fit are sampled in waves


class NativeEngine:
    """Samples with a `Policy`'s module. ``stop_token_ids`` are those of the model, beside a `Sampling`'s
    own.
    """

    description = "the trained model itself, prompts shared (native engine)"
    exactness = cached_property(lambda engine: measure(engine, engine.policy))  # when first asked for

    def __init__(self, policy: Any, *, stop_token_ids: Sequence[int], kv_bytes: int = KV_BYTES) -> None:
        self.stop_token_ids = tuple(stop_token_ids)
        self.kv_bytes = kv_bytes
        self.version = 0
        self.load_weights(policy, version=0)

    def load_weights(self, policy: Any, *, version: int) -> None:
        """Takes the policy's module itself: its weights are always the present ones."""
        if not isinstance(policy.scorer, FlatScorer):
            raise ModelError(
                f"the native engine cannot run {type(policy.model).__name__}: it mixes tokens by other means "
                "than attention, or by its own, so prompts cannot be shared. Set sampling.engine to auto or "
                "hf (razona.engines.hf.HFEngine), which runs what transformers' generate runs."
            )
        self.policy, self.scorer = policy, policy.scorer
        self.tokenizer = policy.tokenizer
        self.version = version

    def close(self) -> None:
        """Nothing is held between calls."""

    @torch.inference_mode()
    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, seeds: Sequence[Sequence[int]]
    ) -> list[Group]:
        """One group per prompt; ``seeds[p][g]`` decides completion g of prompt p, whatever else is in the
        call.
        """
        stops = torch.tensor(sorted({*self.stop_token_ids, *sampling.stop_token_ids}), device=self.device)
        groups: list[Group] = []
        for wave in self._waves(prompts, seeds, sampling):
            wave_seeds = seeds[len(groups) : len(groups) + len(wave)]
            counts = [len(group_seeds) for group_seeds in wave_seeds]
            fast = self.scorer.fast_path
            recorder = None if fast is None else fast.recorder(wave, counts, sampling)
            run = _Wave(self.scorer, wave, sampling, stops, wave_seeds, self.device, recorder)
            tokens, logprobs = run.run()
            saved = [] if recorder is None else recorder.close([len(row) for row in tokens])
            first = 0
            for prompt, group_seeds, activations in zip_longest(wave, wave_seeds, saved):
                rows = range(first, first + len(group_seeds))
                completions = tuple(self._completion(tokens[row], logprobs[row], stops) for row in rows)
                groups.append(Group(prompt, completions, _kv_length(prompt, sampling), activations))
                first += len(group_seeds)
        return groups

    @property
    def device(self) -> torch.device:
        return self.scorer.head.projection.weight.device

    def _completion(self, tokens: list[int], logprobs: list[float], stops: Tensor) -> Completion:
        stopped = tokens[-1] in stops.tolist()
        return Completion(
            token_ids=tuple(tokens),
            logprobs=tuple(logprobs),
            text=self.tokenizer.decode(tokens[:-1] if stopped else tokens, skip_special_tokens=True),
            finish_reason="stop" if stopped else "length",
            policy_version=self.version,
        )

    def _waves(
        self, prompts: Sequence[Prompt], seeds: Sequence[Sequence[int]], sampling: Sampling
    ) -> Iterator[Sequence[Prompt]]:
        """Consecutive prompts whose keys and values fit the budget; one prompt at least."""
        config = self.scorer.model.config.get_text_config()
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width = 2 * config.num_hidden_layers * kv_heads * head_dim
        width *= self.scorer.head.projection.weight.element_size()
        start, used = 0, 0
        for index, prompt in enumerate(prompts):
            size = _kv_length(prompt, sampling) * len(seeds[index]) * width
            if index > start and used + size > self.kv_bytes:
                yield prompts[start:index]
                start, used = index, 0
            used += size
        if start < len(prompts):
            yield prompts[start:]


class _Wave:
    """Prompts sampled together: prefill, then one decode step after the other until every row has finished.

    Row r of the wave writes to ``tokens[r]`` and ``logprobs[r]``; ``buckets`` hold the rows still alive.
    """

    def __init__(
        self,
        scorer: FlatScorer,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        stops: Tensor,
        seeds: Sequence[Sequence[int]],
        device: torch.device,
        recorder: Recorder | None,
    ) -> None:
        self.scorer, self.sampling, self.stops, self.device = scorer, sampling, stops, device
        self.recorder = recorder
        self.owners = [index for index, group_seeds in enumerate(seeds) for _ in group_seeds]
        count = len(self.owners)
        flat_seeds = [seed for group_seeds in seeds for seed in group_seeds]
        self.uniforms = uniforms(flat_seeds, sampling.max_completion_length).to(device)
        # One row more than needed: where a lone row's companion writes.
        self.tokens = torch.zeros(count + 1, sampling.max_completion_length, dtype=torch.long, device=device)
        self.logprobs = torch.zeros(self.tokens.shape, device=device)
        self.lengths = torch.zeros(count + 1, dtype=torch.long, device=device)
        by_length: dict[int, list[int]] = {}
        for row, owner in enumerate(self.owners):
            by_length.setdefault(_kv_length(prompts[owner], sampling), []).append(row)
        self.buckets = [_Bucket(length, rows, device) for length, rows in sorted(by_length.items())]
        if count == 1:  # a matrix product of one row has other bits: the row gets a companion nobody looks at
            self.buckets[0].rows.append(count)
            self.owners.append(0)
            self.uniforms = self.uniforms.repeat(2, 1)
        self.prompts = prompts

    def run(self) -> tuple[list[list[int]], list[list[float]]]:
        """Token ids and log-probs of every row."""
        fast, steps = self.scorer.fast_path, self.sampling.max_completion_length
        with nullcontext() if fast is None else fast.sampling(len(self.owners), steps):
            self._decode_all(self._prefill())
        lengths = self.lengths.masked_fill(self.lengths == 0, self.sampling.max_completion_length).tolist()
        tokens, logprobs = self.tokens.tolist(), self.logprobs.tolist()
        return (
            [row[:n] for row, n in zip(tokens, lengths, strict=True)],
            [row[:n] for row, n in zip(logprobs, lengths, strict=True)],
        )

    def _decode_all(self, hidden: Tensor) -> None:
        for step in range(self.sampling.max_completion_length):
            rows = torch.tensor([row for bucket in self.buckets for row in bucket.rows], device=self.device)
            drawn = self._draw(hidden, rows, step)
            self.tokens[rows, step], self.logprobs[rows, step] = drawn
            alive = self.lengths[rows] == 0
            stopped = torch.isin(drawn[0], self.stops)
            self.lengths[rows[stopped & alive]] = step + 1
            if step + 1 == self.sampling.max_completion_length or not self._retire(stopped | ~alive):
                break
            hidden = self._decode(step)

    def _draw(self, hidden: Tensor, rows: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Token ``step`` of ``rows``, from hidden states ``[live rows, h]``, and its log-probs."""
        head, uniform = self.scorer.head, self.uniforms[rows, step]
        recorder = self.recorder if self.recorder is not None and self.recorder.blocks else None
        raw = head.project(hidden)
        drawn = []
        for tile in (slice(i, i + SAMPLE_TILE) for i in range(0, len(raw), SAMPLE_TILE)):
            found = draw(head.finish(raw[tile], temperature=1.0), uniform[tile], self.sampling)
            drawn.append(found[:2])
            if recorder is not None:  # raw logits are not needed any more
                raw[tile] = head.derivatives(raw[tile], *found, temperature=self.sampling.temperature)
        if recorder is not None:
            recorder.step(rows, step)
            recorder.put_derivatives(raw)
        return torch.cat([token for token, _ in drawn]), torch.cat([logprob for _, logprob in drawn])

    def _prefill(self) -> Tensor:
        """Every prompt once; its keys and values go to all its rows. Returns the last hidden state for every
        row.
        """
        ids = [torch.tensor(prompt.token_ids, device=self.device) for prompt in self.prompts]
        starts = [0, *torch.tensor([len(i) for i in ids]).cumsum(0).tolist()]
        spans = tuple(
            Span(start, len(prompt.token_ids), (), _kv_length(prompt, self.sampling))
            for start, prompt in zip(starts, self.prompts, strict=False)
        )
        row = FlatRow(
            token_ids=torch.cat(ids)[None],
            position_ids=torch.cat([torch.arange(len(i), device=self.device) for i in ids])[None],
            spans=spans,
            source=torch.empty(0),
            target=torch.empty(0),
            scored=torch.empty(0),
            ends=torch.empty(0),
        )
        if row.token_ids.shape[1] == 1:  # as above: never a single row
            row = replace(
                row, token_ids=row.token_ids.repeat(1, 2), position_ids=row.position_ids.repeat(1, 2)
            )

        def sink(layer: int, k: Tensor, v: Tensor) -> None:
            for bucket in self.buckets:
                bucket.fill(layer, k, v, [spans[self.owners[r]] for r in bucket.rows])

        layout = FlatLayout(row, exact=self.scorer.exact, sink=sink)
        if self.recorder is not None:
            self.recorder.prompts()
        hidden = self.scorer.hidden(row.token_ids, row.position_ids, layout, self.recorder)
        ends = [
            spans[self.owners[r]].start + spans[self.owners[r]].prompt_length - 1
            for b in self.buckets
            for r in b.rows
        ]
        return hidden[torch.tensor(ends, device=self.device)]

    def _decode(self, step: int) -> Tensor:
        """Feeds the tokens just drawn. Returns hidden states ``[live rows, h]``."""
        rows = torch.tensor([row for bucket in self.buckets for row in bucket.rows], device=self.device)
        for bucket in self.buckets:
            bucket.advance()
        positions = torch.cat([bucket.positions for bucket in self.buckets])
        if self.recorder is not None:
            self.recorder.step(rows, step)  # those that finished have left
            self.recorder.count()
        tokens, layout = self.tokens[rows, step], DecodeLayout(self.buckets)
        return self.scorer.hidden(tokens[:, None], positions[:, None], layout, self.recorder)

    def _retire(self, finished: Tensor) -> bool:
        """Finished rows leave, their bucket's last rows take their place. False when nobody is left.

        A row that would be left alone keeps a finished one as companion.
        """
        done = finished.tolist()
        if all(done):
            return False
        if not any(done):
            return True
        if sum(not d for d in done) == 1:
            done[done.index(True)] = False
        first = 0
        for bucket in self.buckets:
            count = len(bucket.rows)
            bucket.drop(done[first : first + count])
            first += count
        self.buckets = [bucket for bucket in self.buckets if bucket.rows]
        return True


class _Bucket:
    """Rows of one padded length: keys and values ``[B, 2 * KV, S, D]`` per layer, positions and masks."""

    def __init__(self, kv_length: int, rows: list[int], device: torch.device) -> None:
        self.kv_length, self.rows, self.device = kv_length, rows, device
        self.caches: dict[int, Tensor] = {}
        self.heads = 0  # of keys and values together
        self.positions = torch.zeros(0, dtype=torch.long, device=device)  # of the token fed, per live row
        self.places = self.positions  # of its keys and values ``[B * 2 * KV]``, as a cache lies in memory
        self.views: dict[int, tuple[Tensor, Tensor, Tensor]] = {}  # of a cache: lines, keys, values
        self.masks: dict[int | None, Tensor] = {}  # per sliding window, of the present step
        self.seen = 0  # keys that a row may see at most
        self.length = 0  # keys that attention goes over

    def fill(self, layer: int, k: Tensor, v: Tensor, spans: list[Span]) -> None:
        """Takes the prompt's keys and values ``[N, KV, D]`` for every row."""
        if not len(self.positions):  # the position before the first token fed
            self.positions = torch.tensor([span.prompt_length - 1 for span in spans], device=self.device)
            self.seen = max(span.prompt_length for span in spans)
        kv = torch.cat([k, v], 1)
        self.heads = kv.shape[1]
        self.caches[layer] = kv.new_zeros(len(self.rows), kv.shape[1], self.kv_length, kv.shape[2])
        for row, span in enumerate(spans):
            prompt = kv[span.start : span.start + span.prompt_length]
            self.caches[layer][row, :, : span.prompt_length] = prompt.transpose(0, 1)

    def advance(self) -> None:
        self.positions = self.positions + 1
        lines = torch.arange(len(self.rows) * self.heads, device=self.device).view(-1, self.heads)
        self.places = (lines * self.kv_length + self.positions[:, None]).flatten()
        self.seen += 1
        self.masks.clear()
        length = sufficient_length(self.kv_length, self.seen)
        if length != self.length:
            self.length = length
            self.views.clear()

    def drop(self, done: list[bool]) -> None:
        alive = [row for row, finished in enumerate(done) if not finished]
        holes = [row for row, finished in enumerate(done) if finished and row < len(alive)]
        movers = [row for row in alive if row >= len(alive)]
        order = list(range(len(alive)))
        for hole, mover in zip(holes, movers, strict=True):
            order[hole] = mover
            for held in self.caches.values():
                held[hole] = held[mover]
        self.rows = [self.rows[row] for row in order]
        self.positions = self.positions[order]
        self.views.clear()

    def attend(self, layer: int, q: Tensor, kv: Tensor, options: AttentionOptions) -> Tensor:
        """q ``[B, H, D]`` and kv ``[B, 2 * KV, D]`` of the token being fed -> ``[B, H, D]``."""
        batch, heads, dim = q.shape
        lines, keys, values = self._views(layer)
        lines.index_copy_(0, self.places, kv.reshape(-1, dim))
        kv_heads = keys.shape[1]
        # The query heads of one key/value head become its query rows, repeated up to a multiple of the least
        # count.
        shared, chosen = _query_rows(heads, kv_heads, self.device)
        queries = q.index_select(1, chosen).view(batch, kv_heads, -1, dim)
        out = attention(queries, keys, values, self._mask(options.window, q), options)
        return out[:, :shared].transpose(1, 2).reshape(batch, heads, dim)

    def _views(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Of a layer's cache: its lines ``[.., D]``, and the keys and values ``[B, KV, S, D]`` seen now."""
        if layer not in self.views:
            cache = self.caches[layer]
            keys, values = cache[: len(self.rows), :, : self.length].chunk(2, 1)
            self.views[layer] = cache.view(-1, cache.shape[-1]), keys, values
        return self.views[layer]

    def _mask(self, window: int | None, like: Tensor) -> Tensor:
        if window not in self.masks:
            at, seen = self.positions[:, None], torch.arange(self.length, device=self.device)[None]
            visible = (seen <= at) & (seen > at - window) if window else seen <= at
            mask = torch.zeros(visible.shape, dtype=like.dtype, device=self.device)
            self.masks[window] = mask.masked_fill_(~visible, -torch.inf)[:, None, None]
        return self.masks[window]


@cache
def _query_rows(heads: int, kv_heads: int, device: torch.device) -> tuple[int, Tensor]:
    """How many query heads share a key/value head, and which heads make its query rows, all in a row."""
    shared = heads // kv_heads
    rows = torch.arange(-(-shared // MIN_QUERY_ROWS) * MIN_QUERY_ROWS) % shared
    return shared, (torch.arange(kv_heads)[:, None] * shared + rows).flatten().to(device)


class DecodeLayout:
    """Layout of a decode step: one token per row, bucket after bucket."""

    def __init__(self, buckets: list[_Bucket]) -> None:
        self.buckets = buckets

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        """As transformers passes them: q ``[B, H, 1, D]`` -> ``[B, 1, H, D]``."""
        kv = torch.cat([k[:, :, 0], v[:, :, 0]], 1)
        return self.attend_tokens(layer, q[:, :, 0], kv, options)[:, None]

    def attend_tokens(self, layer: int, q: Tensor, kv: Tensor, options: AttentionOptions) -> Tensor:
        """q ``[B, H, D]``, keys and values side by side in kv ``[B, 2 * KV, D]`` -> ``[B, H, D]``."""
        if len(self.buckets) == 1:
            return self.buckets[0].attend(layer, q, kv, options)
        parts, first = [], 0
        for bucket in self.buckets:
            rows = slice(first, first + len(bucket.rows))
            parts.append(bucket.attend(layer, q[rows], kv[rows], options))
            first = rows.stop
        return torch.cat(parts)


def _kv_length(prompt: Prompt, sampling: Sampling) -> int:
    return padded_length(len(prompt.token_ids) + sampling.max_completion_length)
