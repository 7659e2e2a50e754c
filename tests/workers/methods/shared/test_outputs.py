"""Rows of products on matrix units."""

from __future__ import annotations

import pytest
import torch

from moevolve.workers.methods.shared import outputs
from moevolve.workers.methods.shared.outputs import FeatureBlock, padded


def test_products_on_matrix_units_of_a_cpu_have_few_numbers_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outputs, "widens", lambda _dtype: False)
    hidden = torch.ones(1000, 4, dtype=torch.bfloat16)
    for count, rows in ((1, 128), (128, 128), (129, 256), (1000, 1024)):
        found = padded(torch.arange(count), hidden, 512)
        assert len(found) == rows and torch.equal(found[:count], torch.arange(count)) and not found[count:].any()
    few = torch.arange(3)
    assert padded(few, hidden, 16) is few, "as narrow products are computed in float32"
    assert padded(few, hidden.float(), 512) is few
    monkeypatch.setattr(outputs, "widens", lambda _dtype: True)
    assert padded(few, hidden, 512) is few, "without matrix units"


@pytest.mark.parametrize("tokens", [(0, 1, 2, 3), (1, 3)])
def test_padding_of_a_block_counts_nowhere(tokens: tuple[int, ...]) -> None:
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]])[list(tokens)]
    block = FeatureBlock(slice(0, 2), torch.tensor(tokens), torch.cat((values, torch.full((3, 2), 9.0))))
    given, weights = torch.ones(4, 1), torch.tensor([[1.0], [10.0]])
    block.add_to(given, weights)
    expected = torch.ones(4, 1)
    expected[list(tokens)] += values @ weights
    assert torch.equal(given, expected)
    stream = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    assert torch.equal(block.back(stream), values.t() @ stream[list(tokens)])
