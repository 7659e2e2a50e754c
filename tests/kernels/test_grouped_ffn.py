"""Grouped experts on the CPU against the oracle: every implementation, odd shapes, experts without tokens."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moevolve.kernels import reference
from moevolve.kernels.grouped_ffn import best_implementation, combine, grouped_ffn, sort_by_expert

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-5, torch.float16: 2**-8}


@settings(max_examples=40, deadline=None)
@given(
    counts=st.lists(st.sampled_from([0, 0, 1, 2, 7]), min_size=1, max_size=6),
    hidden=st.sampled_from([8, 12, 33]),
    width=st.sampled_from([8, 16, 17]),
    dtype=st.sampled_from(list(TOLERANCE)),
    activation=st.sampled_from(["silu", "gelu"]),
    seed=st.integers(0, 2**31 - 1),
)
def test_implementations_match_the_oracle(
    counts: list[int], hidden: int, width: int, dtype: torch.dtype, activation: str, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    ends = torch.tensor(counts).cumsum(0).to(torch.int32)
    tokens = torch.randn((sum(counts), hidden), generator=generator).to(dtype)
    gate_up = (torch.randn((len(counts), 2 * width, hidden), generator=generator) / hidden**0.5).to(dtype)
    down = (torch.randn((len(counts), hidden, width), generator=generator) / width**0.5).to(dtype)
    expected = reference.grouped_ffn(tokens, ends, gate_up, down, activation)
    for implementation in (best_implementation(tokens, gate_up, down), "loop"):
        out = grouped_ffn(tokens, ends, gate_up, down, activation, implementation)  # type: ignore[arg-type]
        torch.testing.assert_close(out.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_rows_that_torch_refuses_go_to_the_loop() -> None:
    def best(hidden: int, width: int) -> str:
        return best_implementation(
            torch.zeros((1, hidden)), torch.zeros((2, 2 * width, hidden)), torch.zeros((2, hidden, width))
        )

    assert best(64, 48) == "grouped_mm"
    assert best(33, 48) == best(64, 17) == "loop"


def test_two_candidates_stacked_compute_what_each_computes() -> None:
    """Sorting, experts and combining together are a mixture layer; stacking shifts the second one's expert indices."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn((20, 16), generator=generator)
    gate_up, down = torch.randn((6, 16, 16), generator=generator), torch.randn((6, 16, 8), generator=generator)
    chosen = torch.stack([torch.randperm(3, generator=generator)[:2] for _ in range(20)])
    chosen[chosen == 1] = 0  # expert 1 of each has no token
    weights = torch.rand((20, 2), generator=generator)
    owner = torch.arange(20) % 2
    order, ends = sort_by_expert(chosen + 3 * owner[:, None], 6)
    outputs = grouped_ffn(hidden[order // 2], ends, gate_up, down)
    mixed = combine(outputs, order, weights)
    assert ends.tolist()[1] == ends.tolist()[0]
    for token in range(20):
        expected = torch.zeros(16, dtype=torch.float64)
        for expert, weight in zip(chosen[token] + 3 * owner[token], weights[token], strict=True):
            one = torch.where(torch.arange(6) < expert, 0, 1)
            expected += float(weight) * reference.grouped_ffn(hidden[token : token + 1], one, gate_up, down, "silu")[0]
        torch.testing.assert_close(mixed[token].double(), expected, atol=1e-4, rtol=1e-4)
