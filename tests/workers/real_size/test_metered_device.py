"""The metered device: what it counts, and when it runs out of memory."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from real_size.meter import MeteredDevice, MeteredTensor
from torch import nn

pytestmark = pytest.mark.bench

MIB = 1 << 20


@pytest.fixture
def device() -> Iterator[MeteredDevice]:
    with MeteredDevice(capacity=64 * MIB).installed() as device:
        yield device


def test_a_known_sequence_of_allocations_is_counted_byte_by_byte(device: MeteredDevice) -> None:
    first = torch.empty(MIB, dtype=torch.float32, device="cuda")
    assert device.live == 4 * MIB
    second = first.to(torch.bfloat16)
    assert device.live == 6 * MIB
    third = first + 1
    assert (device.live, device.peak) == (10 * MIB, 10 * MIB)
    del first, third
    assert (device.live, device.peak) == (2 * MIB, 10 * MIB)
    device.reset()
    assert device.peak == 2 * MIB
    small = torch.ones(3, device="cuda")  # torch's allocator has blocks of 512 bytes
    assert device.live == 2 * MIB + 512
    del second, small
    assert device.live == 0


def test_views_of_a_storage_count_once_and_keep_it(device: MeteredDevice) -> None:
    whole = torch.empty(4, MIB, dtype=torch.uint8, device="cuda")
    row, turned, parameter = whole[1], whole.t(), nn.Parameter(whole[2:].float(), requires_grad=False)
    assert device.live == 4 * MIB + 8 * MIB
    again = parameter.data[:1]
    row.copy_(torch.ones(MIB, dtype=torch.uint8))
    assert device.live == 12 * MIB
    assert int(whole.sum()) == MIB + int(whole[0].sum() + whole[2:].sum())
    del whole, turned
    assert device.live == 12 * MIB
    del row
    assert device.live == 8 * MIB
    del parameter
    gc.collect()
    assert device.live == 8 * MIB
    del again
    assert device.live == 0


def test_parameters_that_get_other_data_compute_with_it(device: MeteredDevice) -> None:
    linear = nn.Module.to(nn.Linear(3, 2, bias=False), "cuda")
    loaded, other = linear.weight.data, torch.zeros(2, 3, device="cuda")
    linear.weight.data = other
    linear.weight.data[:, 0].copy_(torch.ones(2, device="cuda"))
    assert linear(torch.ones(1, 3, device="cuda")).tolist() == [[1, 1]] and other[:, 0].tolist() == [1, 1]
    linear.weight.data = loaded
    assert not loaded.cpu().equal(other.cpu()) and linear.weight.cpu().equal(loaded.cpu())


def test_memory_runs_out_as_on_a_gpu(device: MeteredDevice) -> None:
    held = torch.empty(40 * MIB, dtype=torch.uint8, device="cuda")
    with pytest.raises(torch.cuda.OutOfMemoryError, match="Tried to allocate"):
        torch.zeros(30 * MIB, dtype=torch.uint8).to("cuda")
    with pytest.raises(torch.OutOfMemoryError):
        held + 1
    assert device.live == 40 * MIB
    del held
    assert torch.zeros(30 * MIB, dtype=torch.uint8).to("cuda").sum() == 0


def test_the_hosts_tensors_count_apart_and_do_not_mix_with_the_devices(device: MeteredDevice) -> None:
    host, there = torch.ones(4, 4), torch.ones(4, 4).to("cuda")
    assert (host.device.type, there.device.type, there.cpu().device.type) == ("cpu", "cuda", "cpu")
    assert not isinstance(there.to("cpu"), MeteredTensor)
    with pytest.raises(RuntimeError, match="same device"):
        host + there
    assert (there * torch.tensor(2.0)).sum().item() == 32  # a number without dimensions may
    assert host.double().to(there).device.type == there.double().to(there).device.type == "cuda"
    assert there.to(host).device.type == "cpu"
    before = device.live
    pinned = host.pin_memory()
    assert pinned.is_pinned() and device.live == before


def test_products_and_attention_are_what_the_cpu_computes(device: MeteredDevice) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs, weight = torch.randn(5, 48, generator=generator), torch.randn(32, 48, generator=generator)
    heads = torch.randn(1, 2, 7, 16, generator=generator)
    with torch.inference_mode():
        found = nn.functional.linear(inputs.to("cuda"), weight.to("cuda")).cpu()
        there = heads.to("cuda")
        attended = nn.functional.scaled_dot_product_attention(there, there, there, is_causal=True).cpu()
    torch.testing.assert_close(found, inputs @ weight.t())
    torch.testing.assert_close(
        attended, nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    )
    half, wide = inputs.bfloat16(), weight.bfloat16()
    product = nn.functional.linear(half.to("cuda"), wide.to("cuda")).cpu()
    torch.testing.assert_close(product, (half.double() @ wide.double().t()).bfloat16())
    # Groups of rows have their own matrices; the second one has no rows.
    matrices, ends = torch.randn(3, 48, 8).bfloat16(), torch.tensor([2, 2, 5], dtype=torch.int32)
    found = nn.functional.grouped_mm(half.to("cuda"), matrices.to("cuda"), offs=ends.to("cuda")).cpu()
    wanted = torch.cat([half[:2].double() @ matrices[0].double(), half[2:].double() @ matrices[2].double()])
    torch.testing.assert_close(found, wanted.bfloat16())
