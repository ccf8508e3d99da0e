"""Attention of a few queries over K and V that lie in pieces, merged by their log-sum-exp.

Shapes: queries `[1, query head, query, dim]`; a piece's K and V `[run, kv head, token, dim]`, strided at will
but for the last axis. The runs of one piece are equally long and equally far apart; they ride on the batch
axis, one kernel call for all. A partial result is (output, log-sum-exp), `[run, query head, query, dim]` and
`[run, query head, query]`.
"""

import torch
from torch import Tensor

Partial = tuple[Tensor, Tensor]

FOLD_RUNS = 32
"""So many partial outputs are kept before they are folded into one: it bounds the memory of a long prefill."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def attend_all(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Partial:
    """Attends to every token of a piece: history, which all queries see."""
    run_count = key.shape[0]
    if run_count > 1:
        query = query.expand(run_count, -1, -1, -1)
    if key.shape[-1] != value.shape[-1]:
        return _attend_plainly(_scores(query, key, scale), value)
    output, log_sum = _flash(query, key, value, scale=scale)
    return output, log_sum


def attend_causal(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Partial:
    """Attends among as many new tokens as there are queries: query i sees tokens [0, i]."""
    if key.shape[-1] != value.shape[-1]:
        scores = _scores(query, key, scale)
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu_(1)
        return _attend_plainly(scores.masked_fill_(later, -torch.inf), value)
    output, log_sum = _flash(query, key, value, is_causal=True, scale=scale)
    return output, log_sum


def merge(partials: list[Partial]) -> Tensor:
    """Returns what attention over all the pieces at once gives, up to rounding; `[1, head, query, dim]`.

    Merged in float32, whatever the model's type.
    """
    outputs = [output for output, _ in partials]
    if len(partials) == 1 and outputs[0].shape[0] == 1:
        return outputs[0]
    kind = outputs[0].dtype
    if len(partials) == 2 and outputs[0].shape[0] == outputs[1].shape[0] == 1:
        # The usual case, history and new tokens: a third of the cost of the general way.
        weight = torch.sigmoid(partials[1][1] - partials[0][1]).unsqueeze(-1)
        return torch.lerp(outputs[0].float(), outputs[1].float(), weight).to(kind)
    weights = torch.softmax(torch.cat([log_sum for _, log_sum in partials]), 0).unsqueeze(-1)
    return torch.cat(outputs).float().mul_(weights).sum(0, keepdim=True).to(kind)


def fold(partials: list[Partial]) -> Partial:
    """Returns one partial result that stands for all of them."""
    log_sums = torch.cat([log_sum for _, log_sum in partials])
    return merge(partials), torch.logsumexp(log_sums, 0, keepdim=True)


def _scores(query: Tensor, key: Tensor, scale: float | None) -> Tensor:
    # The flash kernel wants K and V of one width; models with wider K (latent attention, unpacked) come here.
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    return (query @ key.transpose(-1, -2)).float() * factor


def _attend_plainly(scores: Tensor, value: Tensor) -> Partial:
    value = value.repeat_interleave(scores.shape[1] // value.shape[1], 1)
    return torch.softmax(scores, -1).to(value.dtype) @ value, torch.logsumexp(scores, -1)
