"""Kernels of our own with the structure of those that public reports say became slower.

Most edits are a constant, so that both sides of a pair are one kernel.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def layer_norm(
    x_ptr, weight_ptr, bias_ptr, y_ptr, stride, columns,
    BLOCK: tl.constexpr, EPS: tl.constexpr, WIDE: tl.constexpr, HINT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    if WIDE:
        row = row.to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    x = tl.load(x_ptr + row * stride + at, mask=inside, other=0.0, eviction_policy=HINT).to(tl.float32)
    centred = x - tl.sum(x, 0) / columns
    variance = tl.sum(tl.where(inside, centred * centred, 0.0), 0) / columns
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * stride + at, centred * tl.rsqrt(variance + EPS) * weight + bias, mask=inside)


@triton.jit
def layer_norm_reordered(
    x_ptr, weight_ptr, bias_ptr, y_ptr, stride, columns,
    BLOCK: tl.constexpr, EPS: tl.constexpr, WIDE: tl.constexpr, HINT: tl.constexpr,
):  # fmt: skip
    """The same with independent statements in another order."""
    at = tl.arange(0, BLOCK)
    inside = at < columns
    row = tl.program_id(0)
    x = tl.load(x_ptr + row * stride + at, mask=inside, other=0.0, eviction_policy=HINT).to(tl.float32)
    centred = x - tl.sum(x, 0) / columns
    variance = tl.sum(tl.where(inside, centred * centred, 0.0), 0) / columns
    bias = tl.load(bias_ptr + at, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * stride + at, centred * tl.rsqrt(variance + EPS) * weight + bias, mask=inside)


@triton.jit
def layer_norm_early(
    x_ptr, weight_ptr, bias_ptr, y_ptr, stride, columns,
    BLOCK: tl.constexpr, EPS: tl.constexpr, WIDE: tl.constexpr, HINT: tl.constexpr,
):  # fmt: skip
    """The same with weight and bias loaded before the second sum."""
    at = tl.arange(0, BLOCK)
    inside = at < columns
    row = tl.program_id(0)
    x = tl.load(x_ptr + row * stride + at, mask=inside, other=0.0, eviction_policy=HINT).to(tl.float32)
    centred = x - tl.sum(x, 0) / columns
    bias = tl.load(bias_ptr + at, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    variance = tl.sum(tl.where(inside, centred * centred, 0.0), 0) / columns
    tl.store(y_ptr + row * stride + at, centred * tl.rsqrt(variance + EPS) * weight + bias, mask=inside)


@triton.jit
def softmax(x_ptr, y_ptr, stride, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride + at, mask=at < columns, other=float("-inf")).to(tl.float32)
    e = tl.exp(x - tl.max(x, 0))
    tl.store(y_ptr + row * stride + at, e / tl.sum(e, 0), mask=at < columns)


@triton.jit
def softmax_renamed(input_ptr, output_ptr, input_stride, n_cols, BLOCK: tl.constexpr):
    # A program has a row.
    program = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    # What is past the row's end is no maximum, and adds nothing.
    values = tl.load(input_ptr + program * input_stride + offsets, mask=offsets < n_cols, other=float("-inf"))
    values = values.to(tl.float32)
    numerator = tl.exp(values - tl.max(values, 0))
    denominator = tl.sum(numerator, 0)
    tl.store(output_ptr + program * input_stride + offsets, numerator / denominator, mask=offsets < n_cols)


@triton.jit
def softmax_in_functions(x_ptr, y_ptr, stride, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    e = _exponentials(tl.load(x_ptr + row * stride + at, mask=at < columns, other=float("-inf")))
    tl.store(y_ptr + row * stride + at, e / tl.sum(e, 0), mask=at < columns)


@triton.jit
def _exponentials(x):
    x = x.to(tl.float32)
    return tl.exp(x - tl.max(x, 0))


@triton.jit
def row_sums(
    x_ptr, y_ptr, rows, stride, columns,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ACCURATE: tl.constexpr = False,
):  # fmt: skip
    """ACCURATE: what rounding loses is carried to the next step."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    sums, lost = tl.zeros((BLOCK_M, BLOCK_N), tl.float32), tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, columns, BLOCK_N):
        at = start + tl.arange(0, BLOCK_N)
        inside = (row < rows)[:, None] & (at < columns)[None, :]
        x = tl.load(x_ptr + row.to(tl.int64)[:, None] * stride + at[None, :], mask=inside, other=0.0)
        if ACCURATE:
            x = x.to(tl.float32) - lost
            total = sums + x
            lost = (total - sums) - x
            sums = total
        else:
            sums += x.to(tl.float32)
    tl.store(y_ptr + row, tl.sum(sums, 1), mask=row < rows)


@triton.jit
def max_of_rows(x_desc, y_ptr, columns, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    i, j = tl.program_id(0), tl.program_id(1)
    x = x_desc.load([i * BLOCK_M, j * BLOCK_N]).to(tl.float32)
    at = j * BLOCK_N + tl.arange(0, BLOCK_N)
    tl.store(y_ptr + i.to(tl.int64) * columns + at, tl.max(x, 0))


@triton.jit
def linear(
    x_ptr, w_ptr, scale_ptr, y_ptr, M, N, K, stride_x, stride_w, stride_y,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr = 8,
    EDIT: tl.constexpr = "none", PRECISION: tl.constexpr = "ieee",
):  # fmt: skip
    """y = x @ w.T, a tile a program.

    EDIT: "scale" the sums at each step; "convert" weights to x's dtype; "gelu" of y
    """
    tile, across = tl.program_id(0), tl.cdiv(N, BLOCK_N)
    first = tile // (GROUP * across) * GROUP
    height = min(tl.cdiv(M, BLOCK_M) - first, GROUP)
    rows = (first + tile % (GROUP * across) % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile % (GROUP * across) // height * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + (rows % M).to(tl.int64)[:, None] * stride_x + depth[None, :]
    w_ptrs = w_ptr + (columns % N).to(tl.int64)[None, :] * stride_w + depth[:, None]
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, tl.cdiv(K, BLOCK_K)):
        x = tl.load(x_ptrs, mask=depth[None, :] < K - k * BLOCK_K, other=0.0)
        w = tl.load(w_ptrs, mask=depth[:, None] < K - k * BLOCK_K, other=0.0)
        if EDIT == "convert":
            w = w.to(x.dtype)
        if EDIT == "scale":
            sums *= tl.load(scale_ptr + k)
        sums = tl.dot(x, w, sums, input_precision=PRECISION)
        x_ptrs += BLOCK_K
        w_ptrs += BLOCK_K
    if EDIT == "gelu":
        sums = 0.5 * sums * (1 + tl.erf(sums * 0.7071067811865476))
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    y_ptrs = y_ptr + rows.to(tl.int64)[:, None] * stride_y + columns[None, :]
    tl.store(y_ptrs, sums.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def persistent_linear(
    x_desc, w_desc, y_desc, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    FLATTEN: tl.constexpr = True, EPILOGUE: tl.constexpr = "store",
):  # fmt: skip
    """y = x @ w.T, a tile after the other, whose halves are stored one by one.

    EPILOGUE: "store"; "reduce" adds to y; "add" reads y first
    """
    PART: tl.constexpr = BLOCK_N // 2
    across = tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, BLOCK_M) * across, tl.num_programs(0), flatten=FLATTEN):
        i, j = tile // across * BLOCK_M, tile % across * BLOCK_N
        sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, K, BLOCK_K):
            sums = tl.dot(x_desc.load([i, k]), w_desc.load([j, k]).T, sums)
        lower, upper = tl.reshape(sums, (BLOCK_M, 2, PART)).permute(0, 2, 1).split()
        if EPILOGUE == "reduce":
            y_desc.atomic_add([i, j], lower.to(y_desc.dtype))
            y_desc.atomic_add([i, j + PART], upper.to(y_desc.dtype))
        else:
            if EPILOGUE == "add":
                lower += y_desc.load([i, j])
            y_desc.store([i, j], lower.to(y_desc.dtype))
            if EPILOGUE == "add":
                upper += y_desc.load([i, j + PART])
            y_desc.store([i, j + PART], upper.to(y_desc.dtype))


@triton.jit
def attention(
    q_ptr, k_ptr, v_ptr, y_ptr, stride, tokens, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr, NORMALISE: tl.constexpr = "once",
):  # fmt: skip
    """NORMALISE: "once", or "always": sums are those of a softmax after each step."""
    rows, d = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, D)
    head = tl.program_id(1).to(tl.int64) * tokens * stride
    q = tl.load(q_ptr + head + rows[:, None] * stride + d[None, :])
    most = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    sums = tl.zeros((BLOCK_M, D), tl.float32)
    for start in range(0, tokens, BLOCK_N):
        at = start + tl.arange(0, BLOCK_N)
        k = tl.load(k_ptr + head + at[None, :] * stride + d[:, None])
        scores = tl.dot(q, k) * scale
        larger = tl.maximum(most, tl.max(scores, 1))
        p = tl.exp2(scores - larger[:, None])
        shrink = tl.exp2(most - larger)
        v = tl.load(v_ptr + head + at[:, None] * stride + d[None, :])
        if NORMALISE == "always":
            new = total * shrink + tl.sum(p, 1)
            p = p / new[:, None]
            sums = tl.dot(p.to(v.dtype), v, sums * (total * shrink / new)[:, None])
            total = new
        else:
            total = total * shrink + tl.sum(p, 1)
            sums = tl.dot(p.to(v.dtype), v, sums * shrink[:, None])
        most = larger
    y = sums if NORMALISE == "always" else sums / total[:, None]
    tl.store(y_ptr + head + rows[:, None] * stride + d[None, :], y.to(y_ptr.dtype.element_ty))


@triton.jit
def attention_bwd(
    q_ptr, k_ptr, v_ptr, dy_ptr, dk_ptr, dv_ptr, dq_ptr, stride, tokens, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Of attention with silu in place of softmax: a program has some keys, and goes through all queries."""
    at, d = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, D)
    head = tl.program_id(1).to(tl.int64) * tokens * stride
    k = tl.load(k_ptr + head + at[:, None] * stride + d[None, :])
    v = tl.load(v_ptr + head + at[:, None] * stride + d[None, :])
    dk, dv = tl.zeros((BLOCK_N, D), tl.float32), tl.zeros((BLOCK_N, D), tl.float32)
    for start in range(0, tokens, BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)
        q = tl.load(q_ptr + head + rows[:, None] * stride + d[None, :])
        dy = tl.load(dy_ptr + head + rows[:, None] * stride + d[None, :])
        scores = tl.dot(k, q.T) * scale
        sigmoid = 1 / (1 + tl.exp(-scores))
        dv = tl.dot((scores * sigmoid).to(dy.dtype), dy, dv)
        ds = tl.dot(v, dy.T) * sigmoid * (1 + scores * (1 - sigmoid)) * scale
        ds = ds.to(q.dtype)
        dk = tl.dot(ds, q, dk)
        tl.atomic_add(dq_ptr + head + rows[:, None] * stride + d[None, :], tl.dot(ds.T, k), sem="relaxed")
    tl.store(dk_ptr + head + at[:, None] * stride + d[None, :], dk.to(dk_ptr.dtype.element_ty))
    tl.store(dv_ptr + head + at[:, None] * stride + d[None, :], dv.to(dv_ptr.dtype.element_ty))


@triton.jit
def sparse_decode(
    q_ptr, kv_ptr, at_ptr, y_ptr, stride, count, scale,
    HEADS: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Attention of a token to the rows of a cache that a table names."""
    token, heads, d = tl.program_id(0).to(tl.int64), tl.arange(0, HEADS), tl.arange(0, D)
    q = tl.load(q_ptr + token * HEADS * D + heads[:, None] * D + d[None, :])
    most = tl.full((HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    sums = tl.zeros((HEADS, D), tl.float32)
    for start in range(0, count, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        at = tl.load(at_ptr + token * count + n, mask=n < count, other=-1)
        rows = kv_ptr + at.to(tl.int64)[:, None] * stride + d[None, :]
        kv = tl.load(rows, mask=(at >= 0)[:, None], other=0.0)
        scores = tl.where((at >= 0)[None, :], tl.dot(q, kv.T) * scale, float("-inf"))
        larger = tl.maximum(most, tl.max(scores, 1))
        p = tl.exp2(scores - larger[:, None])
        shrink = tl.exp2(most - larger)
        total = total * shrink + tl.sum(p, 1)
        sums = sums * shrink[:, None] + tl.dot(p.to(kv.dtype), kv)
        most = larger
    tl.store(y_ptr + token * HEADS * D + heads[:, None] * D + d[None, :], sums / total[:, None])


@triton.jit
def chunk_state(
    k_ptr, w_ptr, u_ptr, g_ptr, h_ptr, tokens, stride_k, stride_v,
    K: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """States of a gated delta rule: chunk after chunk, v = u - w @ h and then h = h * decay + k.T @ v."""
    column, head = tl.program_id(0) * BV + tl.arange(0, BV), tl.program_id(1).to(tl.int64)
    d, t = tl.arange(0, K), tl.arange(0, BT)
    h = tl.zeros((K, BV), tl.float32)
    for chunk in range(0, tl.cdiv(tokens, BT)):
        at = (head * tl.cdiv(tokens, BT) + chunk) * K
        tl.store(h_ptr + (at + d)[:, None] * stride_v + column[None, :], h.to(h_ptr.dtype.element_ty))
        row, inside = head * tokens + chunk * BT + t, chunk * BT + t < tokens
        w = tl.load(w_ptr + row[:, None] * stride_k + d[None, :], mask=inside[:, None], other=0.0)
        u = tl.load(u_ptr + row[:, None] * stride_v + column[None, :], mask=inside[:, None], other=0.0)
        v = u - tl.dot(w, h.to(w.dtype))
        last = tl.load(g_ptr + head * tokens + tl.minimum((chunk + 1) * BT, tokens) - 1)
        g = tl.load(g_ptr + row, mask=inside, other=0.0)
        v = (v * tl.exp(last - g)[:, None]).to(k_ptr.dtype.element_ty)
        k = tl.load(k_ptr + row[None, :] * stride_k + d[:, None], mask=inside[None, :], other=0.0)
        h = tl.dot(k, v, h * tl.exp(last))


@triton.jit
def grouped_wgrad(
    dy_ptr, x_ptr, dw_ptr, starts_ptr, N, K, stride_dy, stride_x,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """dw[expert] = dy.T @ x over the expert's tokens, of which each has another number."""
    expert, across = tl.program_id(1), tl.cdiv(K, BLOCK_K)
    n = tl.program_id(0) // across * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.program_id(0) % across * BLOCK_K + tl.arange(0, BLOCK_K)
    start, end = tl.load(starts_ptr + expert), tl.load(starts_ptr + expert + 1)
    sums = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for token in range(start, end, BLOCK_T):
        t = token + tl.arange(0, BLOCK_T)
        inside = (t < end)[None, :] & (n < N)[:, None]
        dy = tl.load(dy_ptr + t[None, :].to(tl.int64) * stride_dy + n[:, None], mask=inside, other=0.0)
        inside = (t < end)[:, None] & (k < K)[None, :]
        x = tl.load(x_ptr + t[:, None].to(tl.int64) * stride_x + k[None, :], mask=inside, other=0.0)
        sums = tl.dot(dy, x, sums)
    dw = dw_ptr + expert.to(tl.int64) * N * K + n[:, None].to(tl.int64) * K + k[None, :]
    tl.store(dw, sums.to(dw_ptr.dtype.element_ty), mask=(n < N)[:, None] & (k < K)[None, :])
