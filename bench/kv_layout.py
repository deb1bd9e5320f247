"""How should decode read its KV on a CPU? Gather per step, a working copy, or adjacent slots; and which product.

    python -m bench.kv_layout [--quick] [--json FILE]

Eight sequences, one query row each (9 query heads, 3 KV heads, head_dim 64: SmolLM2), bf16 and fp32, attention
alone, per step of 30 layers. Six layers' pools are walked round, so that KV comes from memory as in an engine.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bench.harness import Row, arguments, report, timed
from engine.core.layout import GATHER_BYTES
from kernels import paged_cpu as paged

LAYERS, WALKED, KV_HEADS, GROUP, DIM, BLOCK, SEQUENCES = 30, 6, 3, 3, 64, 16, 8
flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
SCALE = DIM ** -0.5


def variants(tokens: int, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    """Each does the attention of one step for the walked layers."""
    blocks = SEQUENCES * tokens // BLOCK
    pool = torch.randn(WALKED, 2, KV_HEADS, blocks, BLOCK, DIM).to(dtype)
    flat = pool.view(WALKED, 2, KV_HEADS, blocks * BLOCK, DIM)
    copies = torch.randn(WALKED, 2, SEQUENCES, KV_HEADS, tokens, DIM).to(dtype)
    q = torch.randn(SEQUENCES, KV_HEADS * GROUP, DIM).to(dtype)
    slots = torch.randperm(blocks)
    mask = torch.zeros(SEQUENCES, 1, 1, tokens, dtype=dtype)
    scratch = torch.empty(paged.scratch_size(pool[0], blocks), dtype=dtype)
    rows = GROUP + paged.missing_rows(GROUP)

    def folded(q_one: Tensor) -> Tensor:
        grouped = q_one.view(1, KV_HEADS, GROUP, DIM)
        return torch.nn.functional.pad(grouped, (0, 0, 0, rows - GROUP)) if rows > GROUP else grouped

    def each(attend: Callable[[Tensor, Tensor, Tensor], object],
             keys_of: Callable[[int, int], tuple[Tensor, Tensor]]) -> Callable[[], object]:
        def run() -> None:
            for layer in range(WALKED):
                for s in range(SEQUENCES):
                    attend(q[s], *keys_of(layer, s))
        return run

    def adjacent(layer: int, s: int) -> tuple[Tensor, Tensor]:
        span = slice(s * tokens, (s + 1) * tokens)
        return flat[layer, 0, :, span], flat[layer, 1, :, span]

    def gathered(layer: int, s: int) -> tuple[Tensor, Tensor]:
        per = tokens // BLOCK
        k, v = paged.gather(pool[layer], slots[s * per:(s + 1) * per], 1, scratch)
        return k[0], v[0]

    def by_flash(q_one: Tensor, k: Tensor, v: Tensor) -> object:
        return flash(folded(q_one), k[None], v[None], attn_mask=mask[:1], scale=SCALE)

    def by_matmul(q_one: Tensor, k: Tensor, v: Tensor) -> object:
        scores = torch.bmm(q_one.view(KV_HEADS, GROUP, DIM), k.transpose(1, 2)).float().mul_(SCALE)
        return torch.bmm(scores.softmax(-1).to(dtype), v)

    def one_row(q_one: Tensor, k: Tensor, v: Tensor) -> object:
        return torch.nn.functional.scaled_dot_product_attention(
            q_one.view(1, KV_HEADS * GROUP, 1, DIM), k[None], v[None], enable_gqa=True)

    def gather_all() -> None:
        for layer in range(WALKED):
            paged.decode(q, *paged.gather(pool[layer], slots, SEQUENCES, scratch), mask, SCALE)

    def gather_some() -> None:
        some = max(1, GATHER_BYTES // (tokens * 2 * KV_HEADS * DIM * dtype.itemsize))
        per = tokens // BLOCK
        for layer in range(WALKED):
            for s in range(0, SEQUENCES, some):
                k, v = paged.gather(pool[layer], slots[s * per:(s + some) * per], min(some, SEQUENCES - s), scratch)
                paged.decode(q[s:s + some], k, v, mask[s:s + some], SCALE)

    def copies_all() -> None:
        for layer in range(WALKED):
            paged.decode(q, copies[layer, 0], copies[layer, 1], mask, SCALE)

    def copies_matmul() -> None:
        for layer in range(WALKED):
            by_matmul_all(copies[layer, 0].view(-1, tokens, DIM), copies[layer, 1].view(-1, tokens, DIM))

    def by_matmul_all(k: Tensor, v: Tensor) -> None:
        scores = torch.bmm(q.view(-1, GROUP, DIM), k.transpose(1, 2)).float().mul_(SCALE)
        torch.bmm(scores.softmax(-1).to(dtype), v)

    return {
        "(i) gather by block, one flash call for all": gather_all,
        "(i) gather by block, a flash call for 4 MiB": gather_some,
        "(i) gather by block, a flash call each": each(by_flash, gathered),
        "(ii) working copies, one flash call for all": copies_all,
        "(ii) working copies, matmul + softmax for all": copies_matmul,
        "(iii) adjacent slots, a flash call each": each(by_flash, adjacent),
        "(iii) adjacent slots, matmul + softmax each": each(by_matmul, adjacent),
        "(iii) adjacent slots, SDPA with one row": each(one_row, adjacent),
    }


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    torch.set_grad_enabled(False)
    rows = []
    for tokens in (512,) if options.quick else (512, 2048):
        for dtype in (torch.bfloat16, torch.float32):
            for name, work in variants(tokens, dtype).items():
                seconds, spread = timed(work, 3 if options.quick else 7)
                rows.append(Row(f"8 x {tokens} {str(dtype)[6:]} {name}", seconds / WALKED * LAYERS * 1e3,
                                "ms a step", spread))
    report("Attention of a decode step", rows, options)


if __name__ == "__main__":
    main()
