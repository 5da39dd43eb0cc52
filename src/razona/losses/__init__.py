"""Losses as pure functions on tensors: per token or per example, never reduced.

What to average over is a separate decision (`weights`), taken once per optimizer step over all its tokens;
the loss is ``masked_sum(token_loss, weights)``. Micro-batching, padding and data parallelism therefore cannot
change a gradient.
"""
