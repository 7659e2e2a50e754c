"""Block-mixed layers against low rank in a classifier: NanoMoE's Figures 4 and 5 on a demo task. Run it by hand.

    python tests/benchmarks/bench_nanomoe_features.py [--task kin] [--seeds 3] [--steps 100]

The paper's classifier of AG News is an embedding, an average over positions, the layer in question, and a linear layer
to the classes, trained whole. Here the embedding is the demo's dense model, frozen: a prompt's features are the average
of its last hidden states. The layer in question (128 to 128, with a bias and ReLU) and the linear layer behind it are
trained by Adam from random factors, which is the only training by gradients in the repository beside that of the demo.

Trained on the splits `search` and `dev`, 700 prompts; tested on `test`, 1,000 prompts, every 20 steps, of which the
check with the least loss counts (there is no third split). Every form is trained with every seed; a point is the mean.
Then the lower envelopes: the best of each variant within a budget.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from moevolve.workers.methods.nanomoe.edit import BlockForm, Variant

DEMO = Path(__file__).parents[2] / "configs" / "demo"
VARIANTS: tuple[Variant, ...] = ("low_rank", "I", "II", "III")
BLOCKS, RANKS = (2, 4, 8, 16, 32), (1, 2, 4, 8, 16, 32)
BUDGETS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5)


@dataclass(frozen=True, slots=True)
class Rows:
    """Features float32 [n, d] of prompts, and their classes int64 [n]."""

    features: Tensor
    classes: Tensor


@dataclass(frozen=True, slots=True)
class Point:
    """A form trained, means over seeds: losses are in nats, `right` is in %."""

    form: BlockForm
    parameters: int
    flops: int
    train: float
    test: float
    right: float


class BlockLayer(nn.Module):
    """`relu(blockdiag(U) M blockdiag(V) x + b)` with all of it trained; plain low rank has no M."""

    def __init__(self, form: BlockForm, size: int) -> None:
        super().__init__()
        part = size // form.blocks
        self.u = nn.Parameter(torch.randn(form.blocks, part, form.rank) / form.rank**0.5)
        self.v = nn.Parameter(torch.randn(form.blocks, form.rank, part) / size**0.5)
        # A sum over K blocks of independent signs is as large as one block.
        start = torch.randn(form.mixing_shape) if form.variant != "low_rank" else torch.ones(1, 1)
        self.mixing = nn.Parameter(start / (form.rank**0.5 if form.variant == "III" else 1))
        self.mixing.requires_grad_(form.variant != "low_rank")
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        """[n, d] to [n, d]. Written out, as the kernel is for inference."""
        latent = torch.einsum("jrd,njd->njr", self.v, x.unflatten(1, (len(self.v), -1)))
        if self.mixing.dim() == 2:
            mixed = torch.einsum("ij,njr->nir", self.mixing, latent)
        elif self.mixing.dim() == 3:
            mixed = torch.einsum("ijr,njr->nir", self.mixing, latent)
        else:
            diagonal, alpha, beta = self.mixing
            inner = torch.einsum("ijr,njr->nij", beta, latent)
            mixed = torch.einsum("ijr,njr->nir", diagonal, latent) + torch.einsum("ijr,nij->nir", alpha, inner)
        return torch.relu(torch.einsum("idr,nir->nid", self.u, mixed).flatten(1) + self.bias)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="kin", help="a demo task")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100, help="of Adam, on all rows at once")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    train, test = read_rows(options.task, ("search", "dev")), read_rows(options.task, ("test",))
    size = train.features.shape[1]
    print(f"demo-{options.task}, {len(train.classes)} and {len(test.classes)} rows, {options.seeds} seeds")
    points = [trained(form, train, test, options.seeds, options.steps) for form in forms(size)]
    for cost in ("parameters", "flops"):
        for loss in ("train", "test"):
            envelope(points, size, cost, loss)
    for variant in VARIANTS:
        best = min((point for point in points if point.form.variant == variant), key=lambda point: point.test)
        print(
            f"  {variant:8} is best on test with K {best.form.blocks}, r {best.form.rank}: loss {best.test:.4f}, "
            f"{best.right:.1f} % right"
        )


def read_rows(task: str, splits: tuple[str, ...]) -> Rows:
    """Features scaled to a mean square of 1 in every coordinate; classes by the answers of all splits, sorted."""
    folder = DEMO / "data" / task
    answers = sorted({row["answer"] for split in ("search", "dev", "test") for row in read_json(folder, split)})
    rows = [row for split in splits for row in read_json(folder, split)]
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "dense")
    model = AutoModelForCausalLM.from_pretrained(DEMO / "dense", dtype=torch.float32).get_decoder().eval()
    features = []
    with torch.inference_mode():
        for row in rows:
            ids = tokenizer(f"{row['passage']}\nQuestion: {row['question']}\nAnswer:", return_tensors="pt").input_ids
            features.append(model(ids).last_hidden_state[0].mean(dim=0))
    found = torch.stack(features).clone()
    return Rows(found / found.square().mean().sqrt(), torch.tensor([answers.index(row["answer"]) for row in rows]))


def read_json(folder: Path, split: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (folder / f"{split}.jsonl").read_text().splitlines()]


def forms(size: int) -> Iterator[BlockForm]:
    """All that have fewer parameters than the dense layer."""
    for variant in VARIANTS:
        for blocks in BLOCKS if variant != "low_rank" else (1,):
            for rank in RANKS:
                form = BlockForm(variant, blocks, rank)
                if form.parameters(size, size) < size**2:
                    yield form


def trained(form: BlockForm, train: Rows, test: Rows, seeds: int, steps: int) -> Point:
    size, found = train.features.shape[1], []
    for seed in range(seeds):
        torch.manual_seed(seed)
        model = nn.Sequential(BlockLayer(form, size), nn.Linear(size, int(test.classes.max()) + 1))
        adam = torch.optim.Adam(model.parameters(), lr=0.01)
        least = (float("inf"), 0.0)
        for step in range(1, steps + 1):
            loss = nn.functional.cross_entropy(model(train.features), train.classes)
            adam.zero_grad()
            loss.backward()
            adam.step()
            if step % 20 == 0:
                with torch.inference_mode():
                    logits = model(test.features)
                    right = float((logits.argmax(dim=1) == test.classes).double().mean())
                    least = min(least, (float(nn.functional.cross_entropy(logits, test.classes)), right))
        found.append((float(loss.detach()), least[0], 100 * least[1]))
    means = torch.tensor(found, dtype=torch.float64).mean(dim=0).tolist()
    return Point(form, form.parameters(size, size), form.flops(size, size), *means)


def envelope(points: list[Point], size: int, cost: str, loss: str) -> None:
    whole = size**2 * (2 if cost == "flops" else 1)
    print(f"  lower envelopes of {loss} loss by {cost}, as a share of the dense layer's: loss (K, r)")
    print("  budget" + "".join(f"{variant:>20}" for variant in VARIANTS))
    for budget in BUDGETS:
        cells = []
        for variant in VARIANTS:
            within = [p for p in points if p.form.variant == variant and getattr(p, cost) <= budget * whole]
            best = min(within, key=lambda point: float(getattr(point, loss)), default=None)
            cell = "-" if best is None else f"{getattr(best, loss):.4f} ({best.form.blocks:2}, {best.form.rank:2})"
            cells.append(f"{cell:>20}")
        print(f"  {budget:6.2f}" + "".join(cells))


if __name__ == "__main__":
    main()
