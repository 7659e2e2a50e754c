"""`shrink --quantise`: the winner in fewer bits beside it, checked as the winner was; and `--push` of both."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands_here import refusal, run_command, worker_here
from demo_chats import write_chats
from fake_hub import TOKEN, FakeHub, fake_hub
from known_experts import known_split

from moevolve.evaluators.types import PreparedSplit
from moevolve.search.shrink import guard, quantising

DEMO = Path(__file__).parents[3] / "configs" / "demo"
COMMAND = (
    *("shrink", str(DEMO / "model"), "--data", "chats.jsonl", "--experts", "50%", "--evaluations", "4", "-o", "small"),
    *("--repair", "none", "--guard-prompts", "7", "--guard-tokens", "16", "--quantise", "fp8"),
    *("--push", "me/small"),
    *("--set", "engine.chat_template=none", "--set", "workers.count=1"),
)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with fake_hub() as found:
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", found.url)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        yield found


def test_the_winner_is_written_checked_and_pushed_once_more(
    tmp_path: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("compressed_tensors")
    write_chats(tmp_path / "chats.jsonl", 100)
    few = [replace(probe, split=probe.split.head(1)) for probe in guard.general_set()]
    monkeypatch.setattr(guard, "general_set", lambda: few)
    with worker_here():
        done = run_command(tmp_path, *COMMAND, "--force", "--json")
        page = json.loads(done.stdout)
        found, winner = page["quantised"], page["table"]["entries"][-1]
        assert done.returncode == 0 and found["kept"] and found["directory"] == str(tmp_path / "small-fp8"), done.stderr
        assert found["weight_bytes"] < 0.7 * page["written"]["weight_bytes"]
        (score,) = found["entry"]["scores"]
        (before,) = (each for each in winner["scores"] if each["split"] == "test")
        assert found["entry"]["label"] == "best found, fp8" and abs(score["score"] - before["score"]) < 0.1
        first, *general = found["checks"]
        assert first["task"] == "chats" and 0.3 < first["agreement"] < 1 and first["prompts"] == 7
        assert len(general) == len(page["checks"]) - 1 and first != page["checks"][0]
        card = (tmp_path / "small-fp8" / "README.md").read_text()
        assert "## Quantised" in card and card.count("Its own scores on `test`: ") == 1
        assert page["pushed"] == [f"{hub.url}/me/{name}" for name in ("small", "small-fp8")]
        assert {("me/small", "README.md"), ("me/small-fp8", "model.safetensors")} <= hub.files.keys()
        monkeypatch.setattr(quantising, "check_winner", refusing)
        monkeypatch.setenv("HF_TOKEN", "hf_wrong")  # what was uploaded before isn't uploaded again
        again = run_command(tmp_path, *COMMAND)
    assert again.returncode == 1 and "chats: the candidate lost all" in again.stdout, again.stdout + again.stderr
    assert "did not keep small-fp8 (fp8, " in again.stdout and again.stdout.count("uploaded to ") == 1
    assert (tmp_path / "small").is_dir() and not (tmp_path / "small-fp8").exists()


def refusing(*arguments: Any) -> guard.Checks:
    checks, loops = guard.check_winner(*arguments)
    return tuple(replace(check, faults=("lost all",)) for check in checks), loops


def test_what_can_not_be_quantised_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_chats(tmp_path / "chats.jsonl", 100)

    def refused(model: str, *more: str) -> str:
        command = ("shrink", model, "--data", "chats.jsonl", "--experts", "50%", "-o", "small")
        return refusal(*command, *(more or ("--quantise", "int4")))

    packed = tmp_path / "packed"
    packed.mkdir()
    (packed / "config.json").write_text('{"quantization_config": {"quant_method": "fp8"}}')
    (packed / "model.safetensors").write_bytes(b"")
    assert "packed is quantised already; the new checkpoint keeps its format" in refused(str(packed))
    assert "model.gguf is quantised already" in refused("model.gguf")
    monkeypatch.setattr("transformers.utils.hub.cached_file", lambda *_, **__: str(packed / "config.json"))
    assert "owner/packed is quantised already" in refused("owner/packed"), "its config tells, without its weights"
    model = str(DEMO / "model")
    assert "leave --custom-code out" in refused(model, "--quantise", "int4", "--custom-code")
    assert "GGUF has no name for a WordLevel tokenizer" in refused(model, "--quantise", "gguf-q8_0")
    assert "HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set" in refused(model, "--push", "me/small")
    monkeypatch.setattr("huggingface_hub.is_offline_mode", lambda: False)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    assert "there is no token of the hub" in refused(model, "--push", "me/small")
    assert "--public: it is of --push" in refused(model, "--public")
    (tmp_path / "small-int4").mkdir()
    (tmp_path / "small-int4" / "mine").write_text("")
    assert "small-int4: there is something already" in refused(model)
    monkeypatch.setattr(quantising, "find_spec", lambda _: None)
    assert "pip install 'moevolve[quantised]'" in refused(model)
    assert not (tmp_path / "small.shrink").exists()


def test_two_models_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only one of both is in memory, and what is remembered of the full model stays."""
    from moevolve.workers import worker
    from moevolve.workers.contract.edits import IdentityEdit
    from moevolve.workers.contract.settings import EngineConfig, ModelConfig

    made: list[Any] = []

    class Loaded:
        def __init__(self, model: ModelConfig, _: EngineConfig) -> None:
            self.model, self.memory = model.path, dict[str, Any]()
            made.append(self.model)

        def answer(self, edit: Any, *splits: Any) -> Any:
            assert isinstance(edit, IdentityEdit) and all(isinstance(each, PreparedSplit) for each in splits)
            self.memory.setdefault("rows", self.model)
            return self.model, self.memory["rows"]

    monkeypatch.setattr(worker, "EvaluationWorker", Loaded)
    full, other = (ModelConfig(name, device="cpu") for name in ("full", "fp8"))
    models: Any = quantising._TwoModels(full, other, EngineConfig())
    edit: Any = object()
    assert [models.answer(each) for each in (IdentityEdit(), IdentityEdit(), edit, edit, IdentityEdit())] == [
        *(("full", "full"), ("full", "full"), ("fp8", "full"), ("fp8", "full"), ("full", "full"))
    ]
    assert made == ["full", "fp8", "full"]
    assert models.has(IdentityEdit()) and not models.has(edit)
    looks = [guard._of_both(models, edit, [known_split("english")])[0] for _ in range(3)]
    assert looks == 3 * [(("full", "full"), ("fp8", "full"))]
    assert made == ["full", "fp8", "full", "fp8", "full", "fp8"], "each look begins with the model that is there"
