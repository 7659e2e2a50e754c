"""The processes of the profiler, and its checks before models are loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from canned_profilee import CannedProfilees

from moevolve.evaluators.errors import UserError
from moevolve.workers.profiling.checkpoints import check_folder
from moevolve.workers.profiling.process import ProfiledProcess
from moevolve.workers.profiling.report import BatchProfile, ProfiledModel, ProfileError, ProfileSettings, TaskPrompts
from moevolve.workers.profiling.run import ALONE, profile_models

SETTINGS = ProfileSettings((1, 3), prompt_tokens=6, new_tokens=2, timed_runs=3, device="cpu", threads=1)


def test_rates_are_of_the_median() -> None:
    batch = BatchProfile(4, 40, 5, (9.0, 2.0, 1.0), (4.0, 1.0, 2.0), None)
    assert batch.prefill_rate == 4 * 10 / 2.0
    assert batch.decode_rate == 4 * 5 / 2.0
    assert batch.answer_rate == 4 / 3.0


def test_batches_of_a_task_are_of_all_lengths() -> None:
    prompts = TaskPrompts("task", "test", tuple((0,) * (length + 1) for length in range(10)))
    assert prompts.mean == round(5.5)
    assert [len(tokens) for tokens in prompts.batch(1)] == [6]
    assert [len(tokens) for tokens in prompts.batch(5)] == [2, 4, 6, 8, 10]
    assert [len(tokens) for tokens in prompts.batch(10)] == list(range(1, 11))
    assert [len(tokens) for tokens in prompts.batch(20)] == [length for length in range(1, 11) for _ in range(2)]
    assert replace(SETTINGS, prompts=prompts).batch_tokens(2) == 3 + 8
    assert SETTINGS.batch_tokens(3) == 18


def test_padded_prompts_run_as_they_do_alone(checkpoint: Callable[[str], Path]) -> None:
    """Compares the logits of every step and row with one pass over the row's own tokens, which OPT numbers itself."""
    prompts = ((9,), (5, 6, 7), (8, 4, 10, 12, 6, 5))
    settings = ProfileSettings((3,), 8, 2, 1, "cpu", "float32", threads=1, prompts=TaskPrompts("task", "test", prompts))
    profilee = ProfiledProcess(ProfiledModel("opt", str(checkpoint("opt"))), settings)
    model: Any = profilee.model
    seen: list[torch.Tensor] = []
    hook = model.register_forward_hook(lambda module, given, found: seen.append(found.logits[:, -1]))
    profilee.measure(3)
    hook.remove()
    steps = torch.stack(seen)
    assert len(steps) == 3
    for row, prompt in enumerate(prompts):
        written = steps[:, row].argmax(dim=-1).tolist()
        with torch.no_grad():
            alone = model(input_ids=torch.tensor([[*prompt, *written[:2]]])).logits[0, -3:]
        torch.testing.assert_close(steps[:, row], alone, rtol=1e-4, atol=1e-4)


def test_a_gguf_file_is_profiled_as_transformers_loads_it(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    from gguf_checkpoints import Type, lone_gguf, vocabulary
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    words = len(vocabulary()["tokenizer.ggml.tokens"])
    model = LlamaForCausalLM(LlamaConfig(vocab_size=words, num_attention_heads=4, **sizes))
    file = Path(lone_gguf(model, tmp_path / "tiny.gguf", Type.F32).path)
    profilee = ProfiledProcess(ProfiledModel("packed", str(file)), SETTINGS)
    assert profilee.loaded.model_type == "llama" and profilee.measure(1).decode_seconds > 0
    tokens = torch.tensor([[4, 5, 6]])
    with torch.no_grad():
        found, expected = (each(input_ids=tokens).logits for each in (profilee.model, model.eval()))
    torch.testing.assert_close(found.float(), expected.float(), rtol=1e-3, atol=1e-3)


@pytest.fixture
def canned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CannedProfilees:
    (tmp_path / "canned").mkdir()
    return CannedProfilees(monkeypatch, tmp_path / "canned")


def test_models_take_turns(canned: CannedProfilees, tmp_path: Path) -> None:
    models = [ProfiledModel("a", "one"), ProfiledModel("b", "two")]
    report = profile_models(models, SETTINGS, tmp_path)
    loads, turns = canned.events[:2], canned.events[2:]
    assert [event.partition(", pid")[0] for event in loads] == ["one loads beside 0", "two loads beside 1"]
    order = ["one", "two", "one", "two", "two", "one", "one", "two"]
    assert turns == [f"{name} 1" for name in order] + [f"{name} 3" for name in order]
    assert not report.notes and report.reference.label == "a"


def test_one_model_is_held_at_a_time_without_ample_room(canned: CannedProfilees, tmp_path: Path) -> None:
    models = [ProfiledModel("a", "crowded"), ProfiledModel("b", "two")]
    report = profile_models(models, replace(SETTINGS, timed_runs=1), tmp_path)
    assert report.notes == (ALONE,) and [model.label for model in report.models] == ["a", "b"]
    assert [event.partition(", pid")[0] for event in canned.events] == [
        "crowded loads beside 0",
        *["crowded 1"] * 2,
        *["crowded 3"] * 2,
        "two loads beside 0",
        *["two 1"] * 2,
        *["two 3"] * 2,
    ]
    # The peak is that of the run that counts: events 3 and 5 of the log, then 8.
    assert [batch.peak_bytes for batch in report.models[0].batches] == [103, 105]
    assert [batch.peak_bytes for batch in report.models[1].batches] == [108, None]
    assert report.models[1].batches[1].prefill_rate == 3 * 6 / 2


def test_a_killed_process_is_named(canned: CannedProfilees, tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="mine: its process was killed"):
        profile_models([ProfiledModel("mine", "to be killed")], SETTINGS, tmp_path)


def test_a_model_that_does_not_load_is_named(canned: CannedProfilees, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^mine: it doesn't load: gone$"):
        profile_models([ProfiledModel("mine", "gone")], SETTINGS, tmp_path)
    with pytest.raises(UserError, match=r"^it doesn't load: ") as caught:
        ProfiledProcess(ProfiledModel("mine", str(tmp_path / "gone")), SETTINGS)
    assert "\n" not in str(caught.value)


def test_folders_that_are_no_checkpoints(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    good = checkpoint("llama")
    assert check_folder(str(good), False) == good
    with pytest.raises(UserError, match="no such folder"):
        check_folder(str(tmp_path / "none"), False)
    with pytest.raises(UserError, match=r"config\.json"):
        check_folder(str(tmp_path), False)
    settings = json.loads((good / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"auto_map": {"AutoConfig": "code.Config"}}))
    with pytest.raises(UserError, match="safetensors"):
        check_folder(str(tmp_path), False)
    (tmp_path / "model.safetensors").write_bytes(b"")
    # As published before transformers had the family: its own class is taken.
    assert check_folder(str(tmp_path), False) == tmp_path
    code = {"auto_map": {"AutoConfig": "code.Config"}, "model_type": "moevolve_llama"}
    (tmp_path / "config.json").write_text(json.dumps(settings | code))
    with pytest.raises(UserError, match="--trust-remote-code"):
        check_folder(str(tmp_path), False)
    assert check_folder(str(tmp_path), True) == tmp_path
