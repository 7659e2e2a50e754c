"""How a search's fitness is shown follows from the metrics of its tasks."""

from __future__ import annotations

import pytest
from store_samples import decided, evaluation, individual, search, split

from moevolve.store.repository import Store
from moevolve.store.scales import SearchScales

TEXT = {"metric": "inverse_perplexity"}


@pytest.mark.parametrize(
    ("metrics", "config", "scales"),
    [
        ((TEXT, TEXT), "{}", SearchScales("perplexity", "perplexity")),
        ((TEXT, TEXT), '{"task_aggregation": "worst"}', SearchScales("percent", "perplexity")),
        ((TEXT, {}), "{}", SearchScales("percent", "percent")),
        (({"metric": "of another version"}, {}), "{}", SearchScales("percent", "percent")),
    ],
)
def test_scales(store: Store, metrics: tuple[dict[str, str], ...], config: str, scales: SearchScales) -> None:
    tasks = ("one", "two")
    store.create_search(search(config=config), [split(task) for task in tasks])
    assert store.scales("id-alpha") == SearchScales(), "before there is an evaluation"
    found = [evaluation(0, 0.0625, task, **metric) for task, metric in zip(tasks, metrics, strict=True)]
    store.record("id-alpha", [decided(individual(0), 0.0625)], found)
    assert store.scales("id-alpha") == scales
    (summary,) = store.searches()
    assert (summary.scale, summary.mean_scale) == (scales.fitness, scales.mean)
    assert store.individual("alpha:0").scale == store.ancestors("alpha:0").scale == scales.fitness
    (event,) = store.latest_events("id-alpha", kinds=["best"])
    assert event.text == ("individual 0: 16.00 ppl" if scales.fitness == "perplexity" else "individual 0: 6.2 %")
    (row, *_) = store.best("one", by="search")
    assert row.scale == ("perplexity" if metrics[0] is TEXT else "percent")
