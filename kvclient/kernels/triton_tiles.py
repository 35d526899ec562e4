"""The kernels' arithmetic once more, in Triton: a second backend, and a specification that runs anywhere.

Owns the loops; whoever calls them (kvclient.kernels.triton_calls) owns the tables. Reads the very structs of
native/kernels.h: a segment is WORDS 64-bit words. Never keeps K or V in another form than it found them in.
Invariant: fp32 sums; what fp16 cannot hold is never made of a scale times a query.
"""

from __future__ import annotations

import triton
import triton.language as tl

WORDS: tl.constexpr = tl.constexpr(17)
LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
MAGIC: tl.constexpr = tl.constexpr(12582912.0)  # 1.5 * 2^23: added and taken away, it rounds half to even


@triton.jit
def _elements(address, offset, mask, DTYPE: tl.constexpr):
    """fp32 of elements `offset` bytes behind an address. DTYPE: kvk_codec."""
    if DTYPE == 0:
        x = tl.load((address + offset).to(tl.pointer_type(tl.float32)), mask=mask, other=0.0)
    elif DTYPE == 1:
        x = tl.load((address + offset).to(tl.pointer_type(tl.float16)), mask=mask, other=0.0)
    else:
        x = tl.load((address + offset).to(tl.pointer_type(tl.bfloat16)), mask=mask, other=0.0)
    return x.to(tl.float32)


@triton.jit
def _put(address, offset, x, mask, DTYPE: tl.constexpr):
    if DTYPE == 0:
        tl.store((address + offset).to(tl.pointer_type(tl.float32)), x, mask=mask)
    elif DTYPE == 1:
        tl.store((address + offset).to(tl.pointer_type(tl.float16)), x.to(tl.float16), mask=mask)
    else:
        tl.store((address + offset).to(tl.pointer_type(tl.bfloat16)), x.to(tl.bfloat16), mask=mask)


@triton.jit
def _word(segment, index: tl.constexpr):
    return tl.load(segment + index)


@triton.jit
def _codes(address, rows, dims, stride, mask, codec):
    """fp32 codes of tokens `rows`: one a byte, or two, the even element in the low half."""
    wide = codec == 3
    place = tl.where(wide, dims, dims // 2)
    byte = tl.load(
        (address + rows[:, None] * stride + place[None]).to(tl.pointer_type(tl.uint8)), mask=mask, other=0
    ).to(tl.int32)
    half = (byte >> (4 * (dims % 2))[None]) & 15
    return tl.where(wide, byte, half).to(tl.float32)


@triton.jit
def _keys(segment, head, rows, dims, inside, D: tl.constexpr, ELEMENT: tl.constexpr):
    codec = (_word(segment, 16) & 0xFFFFFFFF).to(tl.int32)
    address = _word(segment, 0) + head * _word(segment, 2)
    mask = inside[:, None] & (dims < D)[None]
    if codec <= 2:
        size: tl.constexpr = 4 if ELEMENT == 0 else 2
        offset = rows[:, None] * _word(segment, 3) + dims[None] * size
        keys = _elements(address, offset, mask, ELEMENT)
    else:
        group = (_word(segment, 16) >> 32).to(tl.int32)
        place = 2 * ((rows // group)[:, None].to(tl.int64) * D + dims[None])
        scales = head * _word(segment, 10)
        scale = _elements(_word(segment, 6) + scales, place, mask, 1)
        zero = _elements(_word(segment, 7) + scales, place, mask, 1)
        keys = _codes(address, rows, dims, _word(segment, 3), mask, codec) * scale + zero
    return tl.where(mask, keys, 0.0)


@triton.jit
def _values(segment, head, rows, dims, inside, D: tl.constexpr, ELEMENT: tl.constexpr):
    codec = (_word(segment, 16) & 0xFFFFFFFF).to(tl.int32)
    address = _word(segment, 1) + head * _word(segment, 4)
    mask = inside[:, None] & (dims < D)[None]
    if codec <= 2:
        size: tl.constexpr = 4 if ELEMENT == 0 else 2
        offset = rows[:, None] * _word(segment, 5) + dims[None] * size
        values = _elements(address, offset, mask, ELEMENT)
    else:
        scales = head * _word(segment, 11) + 2 * rows
        scale = _elements(_word(segment, 8), scales, inside, 1)
        zero = _elements(_word(segment, 9), scales, inside, 1)
        values = _codes(address, rows, dims, _word(segment, 5), mask, codec) * scale[:, None] + zero[:, None]
    return tl.where(mask, values, 0.0)


@triton.jit
def _turned_back(segment, q, partner, dims, rotary_dim, INTERLEAVED: tl.constexpr):
    """The query as this segment's keys see it; `partner` is the other element of each one's pair."""
    table = _word(segment, 12)
    half = rotary_dim // 2
    if INTERLEAVED:
        index, second = dims // 2, dims % 2 == 1
    else:
        index, second = dims % half, dims >= half
    turns = dims < tl.where(table != 0, rotary_dim, 0)
    cosine = tl.load((table + 4 * index).to(tl.pointer_type(tl.float32)), mask=turns, other=1.0)
    sine = tl.load((table + 4 * (index + half)).to(tl.pointer_type(tl.float32)), mask=turns, other=0.0)
    sine = tl.where(second, -sine, sine)
    return q * cosine[None] + partner * sine[None]


@triton.jit
def _rows_of(first, stop, group, kv_head, BLOCK_M: tl.constexpr):
    """Row r of a KV head is query token r // group, query head r % group of it."""
    rows = first + tl.arange(0, BLOCK_M)
    return rows < stop, rows // group, kv_head * group + rows % group


@triton.jit
def _other_of_pair(dims, rotary_dim, INTERLEAVED: tl.constexpr):
    half = rotary_dim // 2
    if INTERLEAVED:
        other = dims + 1 - 2 * (dims % 2)
    else:
        other = tl.where(dims < half, dims + half, dims - half)
    return tl.where(dims < rotary_dim, other, dims)


@triton.jit
def _seen(queries, keys, there, window, CAUSAL: tl.constexpr):
    distance = queries[:, None] - keys[None]
    seen = there
    if CAUSAL:
        seen = seen & (distance >= 0)
    if window > 0:
        seen = seen & (distance < window)
    return seen


@triton.jit
def attend_tile(
    table, segments, q, q_batch, q_head, q_token, positions, out, out_batch, out_head, out_token, lse, sinks,
    partial, kv_heads, group, tokens, scale, softcap, window, rotary_dim, splits, D: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, QUERY: tl.constexpr,
    CAUSAL: tl.constexpr, INTERLEAVED: tl.constexpr, TURNED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """BLOCK_M rows of one KV head of one batch row, over every `splits`-th segment of it."""
    size: tl.constexpr = 4 if QUERY == 0 else 2
    batch, kv_head, split = tl.program_id(1) // kv_heads, tl.program_id(1) % kv_heads, tl.program_id(2)
    dims = tl.arange(0, BLOCK_D)
    real, token, head = _rows_of(tl.program_id(0) * BLOCK_M, tokens * group, group, kv_head, BLOCK_M)
    inside = real[:, None] & (dims < D)[None]
    row = batch * q_batch + head * q_head + token * q_token
    query = _elements(q, row[:, None] + size * dims[None], inside, QUERY)
    partner = query
    if TURNED:
        other = _other_of_pair(dims, rotary_dim, INTERLEAVED)
        partner = _elements(q, row[:, None] + size * other[None], inside, QUERY)
    place = tl.load(
        (positions + 8 * (batch * tokens + token)).to(tl.pointer_type(tl.int64)), mask=real, other=0
    )
    last, first_seen = tl.max(place, 0), tl.min(tl.where(real, place, 1 << 62), 0)
    most = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    sums = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for number in range(split, segments, splits):
        segment = table.to(tl.pointer_type(tl.int64)) + (batch * segments + number) * WORDS
        key_at, start = _word(segment, 14), (_word(segment, 15) & 0xFFFFFFFF).to(tl.int64)
        count = (_word(segment, 15) >> 32).to(tl.int64)
        stop, begin = count, count * 0
        if CAUSAL:
            stop = tl.minimum(stop, last - key_at + 1)
        if window > 0:
            begin = tl.maximum(begin, first_seen - key_at - window + 1) // BLOCK_N * BLOCK_N
        if begin < stop:
            turned = query
            if TURNED:
                turned = _turned_back(segment, query, partner, dims, rotary_dim, INTERLEAVED)
            for at in range(begin, stop, BLOCK_N):
                lanes = at + tl.arange(0, BLOCK_N).to(tl.int64)
                there = lanes < stop
                keys = _keys(segment, kv_head, start + lanes, dims, there, D, QUERY)
                scores = tl.dot(turned, tl.trans(keys), input_precision=PRECISION) * scale
                if softcap > 0:
                    scores = softcap * (1 - 2 / (1 + tl.exp(tl.minimum(2 * scores / softcap, 80.0))))
                seen = _seen(place, key_at + lanes, there[None] & real[:, None], window, CAUSAL)
                scores = tl.where(seen, scores * LOG2E, float("-inf"))
                now = tl.maximum(most, tl.max(scores, 1))
                against = tl.where(now == float("-inf"), 0.0, now)
                weights = tl.exp2(scores - against[:, None])
                down = tl.exp2(most - against)
                total = total * down + tl.sum(weights, 1)
                values = _values(segment, kv_head, start + lanes, dims, there, D, QUERY)
                sums = sums * down[:, None] + tl.dot(weights, values, input_precision=PRECISION)
                most = now
    if splits > 1:
        index = (split * tl.num_programs(1) + tl.program_id(1)) * tokens * group + tl.program_id(0) * BLOCK_M
        to = (partial + 4 * (index + tl.arange(0, BLOCK_M)) * (BLOCK_D + 2)).to(tl.pointer_type(tl.float32))
        tl.store(to[:, None] + dims[None], sums, mask=real[:, None])
        tl.store(to + BLOCK_D, most, mask=real)
        tl.store(to + BLOCK_D + 1, total, mask=real)
    else:
        _finish(
            most, total, sums, real, batch, token, head, dims, out, out_batch, out_head, out_token, lse,
            sinks, kv_heads * group, tokens, D, QUERY,
        )  # fmt: skip


@triton.jit
def _finish(
    most, total, sums, real, batch, token, head, dims, out, out_batch, out_head, out_token, lse, sinks,
    heads, tokens, D: tl.constexpr, QUERY: tl.constexpr,
):  # fmt: skip
    size: tl.constexpr = 4 if QUERY == 0 else 2
    down = tl.full(most.shape, 1.0, tl.float32)
    if sinks != 0:
        from_here = (sinks.to(tl.int64) + 4 * head).to(tl.pointer_type(tl.float32))
        sink = tl.load(from_here, mask=real, other=0.0) * LOG2E
        now = tl.maximum(most, sink)
        against = tl.where(now == float("-inf"), 0.0, now)  # a sink of -inf is none
        down = tl.exp2(most - against)
        total = total * down + tl.exp2(sink - against)
        most = now
    share = tl.where(total == 0, 0.0, down / tl.where(total == 0, 1.0, total))
    place = batch * out_batch + head * out_head + token * out_token
    inside = real[:, None] & (dims < D)[None]
    _put(out, place[:, None] + size * dims[None], sums * share[:, None], inside, QUERY)
    if lse != 0:
        log = tl.where(total == 0, float("-inf"), (most + tl.log2(tl.where(total == 0, 1.0, total))) * LN2)
        at = lse.to(tl.int64) + 4 * ((batch * heads + head) * tokens + token)
        at = at.to(tl.pointer_type(tl.float32))
        tl.store(at, log, mask=real)


@triton.jit
def merge_tile(
    partial, out, out_batch, out_head, out_token, lse, sinks, kv_heads, group, tokens, splits,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, QUERY: tl.constexpr,
):  # fmt: skip
    """Puts together what attend_tile left of the splits, for the same rows."""
    batch, kv_head = tl.program_id(1) // kv_heads, tl.program_id(1) % kv_heads
    dims = tl.arange(0, BLOCK_D)
    real, token, head = _rows_of(tl.program_id(0) * BLOCK_M, tokens * group, group, kv_head, BLOCK_M)
    most = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    sums = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for split in range(splits):
        index = (split * tl.num_programs(1) + tl.program_id(1)) * tokens * group + tl.program_id(0) * BLOCK_M
        at = (partial + 4 * (index + tl.arange(0, BLOCK_M)) * (BLOCK_D + 2)).to(tl.pointer_type(tl.float32))
        share = tl.load(at + BLOCK_D, mask=real, other=float("-inf"))
        now = tl.maximum(most, share)
        against = tl.where(now == float("-inf"), 0.0, now)
        down, up = tl.exp2(most - against), tl.exp2(share - against)
        total = total * down + tl.load(at + BLOCK_D + 1, mask=real, other=0.0) * up
        own_sums = tl.load(at[:, None] + dims[None], mask=real[:, None], other=0.0)
        sums = sums * down[:, None] + own_sums * up[:, None]
        most = now
    _finish(
        most, total, sums, real, batch, token, head, dims, out, out_batch, out_head, out_token, lse, sinks,
        kv_heads * group, tokens, D, QUERY,
    )  # fmt: skip


# ---------------------------------------------------------------- quantising


@triton.jit
def _next_half(half, up: tl.constexpr):
    """The fp16 number next to it, above or below."""
    bits = half.to(tl.int16, bitcast=True)
    away = (bits >= 0) if up else (bits < 0)  # from zero
    smallest = 1 if up else -32767
    step = tl.where(away, bits + 1, bits - 1).to(tl.int16)
    none = (bits & 0x7FFF) == 0
    return tl.where(none, tl.full(bits.shape, smallest, tl.int16), step).to(tl.float16, bitcast=True)


@triton.jit
def quantise_tile(
    elements, head_stride, token_stride, codes, codes_head, codes_token, scales_at, zeros_at, scale_head,
    status,
    tokens, D: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr, DTYPE: tl.constexpr,
    BITS: tl.constexpr,
):  # fmt: skip
    """Tokens that share scales: K per channel (GROUP tokens), or V per token (GROUP 0, sixteen of them)."""
    size: tl.constexpr = 4 if DTYPE == 0 else 2
    many: tl.constexpr = GROUP if GROUP > 0 else 16
    levels: tl.constexpr = 255.0 if BITS == 8 else 15.0
    head, block = tl.program_id(1).to(tl.int64), tl.program_id(0)
    rows = block * many + tl.arange(0, many).to(tl.int64)
    dims = tl.arange(0, BLOCK_D)
    there, inside = rows < tokens, (rows < tokens)[:, None] & (dims < D)[None]
    offset = head * head_stride + rows[:, None] * token_stride + size * dims[None]
    x = _elements(elements, offset, inside, DTYPE)
    wrong = tl.max(tl.max(tl.where(inside & ~(tl.abs(x) <= 65504.0), 1, 0), 1), 0)
    if wrong > 0:
        tl.store(status.to(tl.pointer_type(tl.int32)), wrong)
    axis: tl.constexpr = 0 if GROUP > 0 else 1
    low = tl.min(tl.where(inside, x, float("inf")), axis) + 0.0
    high = tl.max(tl.where(inside, x, float("-inf")), axis)
    some = (dims < D) if GROUP > 0 else there
    low, high = tl.where(some, low, 0.0), tl.where(some, high, 0.0)
    near = low.to(tl.float16)
    zeros = tl.where(near.to(tl.float32) > low, _next_half(near, False), near)
    span = tl.div_rn(high - zeros.to(tl.float32), tl.full(high.shape, levels, tl.float32))
    near = span.to(tl.float16)
    scales = tl.where(near.to(tl.float32) < span, _next_half(near, True), near)
    place = head * scale_head + 2 * ((block.to(tl.int64) * D + dims) if GROUP > 0 else rows)
    tl.store((zeros_at + place).to(tl.pointer_type(tl.float16)), zeros, mask=some)
    tl.store((scales_at + place).to(tl.pointer_type(tl.float16)), scales, mask=some)
    step = tl.expand_dims(scales.to(tl.float32), axis)
    steps = tl.div_rn(x - tl.expand_dims(zeros.to(tl.float32), axis), tl.where(step == 0, float("inf"), step))
    steps = tl.minimum((steps + MAGIC) - MAGIC, levels)
    whole = tl.where(inside, steps, 0.0).to(tl.int32)
    to = codes + head * codes_head + rows[:, None] * codes_token
    if BITS == 8:
        tl.store((to + dims[None]).to(tl.pointer_type(tl.uint8)), whole.to(tl.uint8), mask=inside)
    else:
        even, odd = tl.split(tl.reshape(whole, (many, BLOCK_D // 2, 2)))
        halves = tl.arange(0, BLOCK_D // 2)
        both = (even | (odd << 4)).to(tl.uint8)
        mask = there[:, None] & (halves < D // 2)[None]
        tl.store((to + halves[None]).to(tl.pointer_type(tl.uint8)), both, mask=mask)
