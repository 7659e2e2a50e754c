"""Amounts: numbers of experts from shares and sizes, and sizes of checkpoints from headers alone."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from edit_checks import write_source
from families import edit_of_kind, random_model
from repair_samples import rows_of, sequences_of
from tiny_models import word_tokenizer

from moevolve.evaluators.errors import UserError
from moevolve.kernels.routing_rule import RoutingGroups, RoutingRule
from moevolve.search.shrink.amounts import fitting_experts, fitting_share, kept_experts
from moevolve.search.shrink.goal import Amount, read_goal
from moevolve.search.shrink.request import ShrinkRequest
from moevolve.workers.contract.card import ExportCard
from moevolve.workers.contract.facts import FileSizes
from moevolve.workers.contract.settings import ModelConfig
from moevolve.workers.export.export import export_model
from moevolve.workers.export.sizes import file_sizes
from moevolve.workers.methods.eep.edit import stock_space
from moevolve.workers.methods.repair.edit import RepairedEdit, RepairSettings

DEMO = ModelConfig(str(Path(__file__).parents[3] / "configs" / "demo" / "model"), device="cpu")
CARD = ExportCard("A small model", "someone/base", "f00d", "trial", "42", "trial#17", (), ())


def asked(**parameters: Any) -> Amount:
    return read_goal(ShrinkRequest("model", data=("chats.jsonl",), **parameters)).amount


def test_a_share_of_experts_is_rounded_to_what_the_routing_groups_allow() -> None:
    free, grouped = RoutingGroups(), RoutingGroups(4, 2, 2)

    def kept(text: str, experts: int, groups: RoutingGroups) -> int:
        return kept_experts(asked(experts=text), experts, groups)

    assert [kept(share, 8, free) for share in ("50%", "12.5 %", "1%", "3")] == [4, 1, 1, 3]
    assert [kept(share, 32, grouped) for share in ("50%", "30%", "5%", "12")] == [16, 8, 8, 12]
    with pytest.raises(UserError, match=r"--experts 9: .* can keep: 1 to 8"):
        kept("9", 8, free)
    with pytest.raises(UserError, match="can keep: 8, 12, 16"):
        kept("6", 16, grouped)
    for wanted in ("99%", "8"):
        with pytest.raises(UserError, match=f"--experts {wanted} keeps all 8 experts"):
            kept(wanted, 8, free)


def test_a_share_of_neurons_is_a_percentage() -> None:
    assert [asked(neurons=text).share for text in ("12.5%", " 99 %", "0.5%")] == [0.125, 0.99, 0.005]
    for text in ("0%", "101%", "4", "half"):
        with pytest.raises(UserError, match=f"--neurons {text}: give a share"):
            asked(neurons=text)


def test_the_largest_number_of_experts_that_fits_is_kept() -> None:
    files, budget = FileSizes(fixed=1000, expert=100, neurons=90), asked(size="1.5kB")
    assert budget == Amount("size", "1.5kB", number=1500)
    assert fitting_experts(budget, files, 8, RoutingGroups()) == 5, "to the byte"
    assert fitting_experts(budget, FileSizes(1001, 100, 90), 8, RoutingGroups()) == 4
    assert fitting_experts(budget, files, 8, RoutingGroups(4, 2, 1)) == 4, "a number of which each group has a part"
    with pytest.raises(UserError, match=r"--size 1.5kB: the smallest that this model can be is 0.0 MiB, with 1 of 8"):
        fitting_experts(replace(budget, number=1099), files, 8, RoutingGroups())
    assert fitting_experts(replace(budget, number=1799), files, 8, RoutingGroups()) == 7
    with pytest.raises(UserError, match=r"--size 1.5kB: the whole model takes 0.0 MiB and fits"):
        fitting_experts(replace(budget, number=1800), files, 8, RoutingGroups())


def test_the_largest_share_of_neurons_that_fits_is_kept() -> None:
    files, budget = FileSizes(fixed=1000, expert=100, neurons=90), asked(size="1.5kB")
    # 1,000 bytes besides the experts, 80 for the routers of all, and 420 for neurons.
    assert fitting_share(budget, files, 8) == math.floor(1e6 * 420 / 720) / 1e6
    assert fitting_share(replace(budget, number=1799), files, 8) == math.floor(1e6 * 719 / 720) / 1e6
    for number in (1800, 1080):
        with pytest.raises(UserError, match=r"--size 1.5kB: .* 0.0 MiB"):
            fitting_share(replace(budget, number=number), files, 8)


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({}, "one of --experts .* --neurons .* --size .* and --keep-score"),
        ({"experts": "4", "size": "1GiB"}, "one of --experts .* and --keep-score"),
        ({"size": "16"}, "--size 16: give a number with a unit"),
        ({"experts": "100%"}, "--experts 100% keeps everything"),
        ({"experts": "0%"}, "--experts 0%: give a number such as 8"),
        ({"experts": "9" * 5000}, "--experts 9+: give a number such as 8"),
        ({"size": "9" * 5000 + "GiB"}, "--size 9+GiB: give a number with a unit"),
        ({"experts": "4", "time": "9" * 5000 + "h"}, "--time 9+h: give a number with a unit"),
        ({"neurons": "half"}, "--neurons half: give a share"),
        ({"active": "100.0 %"}, "--active 100.0 % keeps everything"),
        ({"keep_score": "100%"}, "--keep-score 100%: give a share below 100%"),
        ({"keep_score": "most"}, "--keep-score most: give a share below 100%"),
        ({"keep_score": "99%", "dry_run": True}, "--keep-score .* --dry-run"),
        ({"experts": "4", "time": "2h", "evaluations": 9}, "--time and --evaluations"),
        ({"experts": "4", "guard_time": "soon"}, "--guard-time soon: give a number with a unit"),
    ],
)
def test_a_goal_that_is_none_is_refused(parameters: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        asked(**parameters)


@pytest.mark.parametrize("kept", [4, 8])
def test_files_of_narrower_experts_are_as_large_as_predicted(tmp_path: Path, kept: int) -> None:
    budget = asked(size="3MB")
    share = fitting_share(budget, file_sizes(DEMO, "stock"), 8)
    narrow = replace(edit_of_kind(5, 8, "prune", kept), width=int(share * 8 / kept * 16) * 8)
    edit = RepairedEdit(narrow, RepairSettings((0.1,), neurons=True), rows_of(sequences_of((9, 14, 11))))
    export_model(DEMO, edit, tmp_path / "out", CARD)
    written = sum(file.stat().st_size for file in (tmp_path / "out").glob("*.safetensors"))
    assert 0.9 * budget.number < written <= budget.number


def test_files_are_as_large_as_predicted(tmp_path: Path) -> None:
    edit = edit_of_kind(5, 8, "prune", retained=3)
    export_model(DEMO, edit, tmp_path / "stock", CARD)
    write_source(DEMO, edit, tmp_path / "source", CARD)
    for form in ("stock", "source"):
        written = (tmp_path / form / "model.safetensors").stat().st_size
        predicted = file_sizes(DEMO, form).total(3)  # type: ignore[arg-type]
        assert written <= predicted < 1.005 * written


def test_a_dry_run_keeps_the_budget_or_says_what_is_possible(tmp_path: Path, in_process: Any) -> None:
    (tmp_path / "text.txt").write_text("\n\n".join(f"{n} " + "word " * 90 for n in range(100)))
    command = ("shrink", DEMO.path, "--data", "text.txt", "-o", "small", "--dry-run")
    for size, found in (("1MiB", "neuron_share: 0.0"), ("3MB", "neuron_share: 0.5")):
        done = in_process(*command, "--size", size, cwd=tmp_path)
        assert done.returncode == 0 and found in done.stdout and "fewest" in done.stdout
    for size in ("1GB", "5MB"):
        for form in ((), ("--repair", "none")):
            done = in_process(*command, "--size", size, *form, cwd=tmp_path)
            said = f"--size {size}: the whole model takes 4.5 MiB and fits; give a smaller size"
            assert done.returncode == 2 and said in " ".join(done.stderr.split())
    done = in_process(*command, "--size", "700kB", cwd=tmp_path)
    assert done.returncode == 2 and "all that isn't neurons of experts takes 0.8 MiB already" in done.stderr
    done = in_process(*command, "--size", "1MiB", "--repair", "none", cwd=tmp_path)
    assert done.returncode == 2 and "the smallest that this model can be is 1.2 MiB, with 1 of 8" in done.stderr
    done = in_process(*command, "--size", "3MB", "--repair", "none", cwd=tmp_path)
    assert done.returncode == 0 and "experts: 4" in done.stdout and "random_baselines: 8" in done.stdout
    done = in_process(*command, "--neurons", "12.5%", cwd=tmp_path)
    assert done.returncode == 0 and "neuron_share: 0.125" in done.stdout and "fewest" in done.stdout
    done = in_process(*command, "--neurons", "12.5%", "--repair", "none", cwd=tmp_path)
    assert done.returncode == 2 and "--neurons 12.5%: narrower experts require a repair" in done.stderr


def test_narrower_experts_are_stock_unless_custom_code_is_allowed(tmp_path: Path, in_process: Any) -> None:
    (tmp_path / "text.txt").write_text("\n\n".join(f"{n} " + "word " * 90 for n in range(100)))
    fine = str(Path(DEMO.path).with_name("fine"))

    def run(model: str, *options: str) -> Any:
        options = ("--data", "text.txt", "-o", "small", "--dry-run", *options)
        return in_process("shrink", model, *options, cwd=tmp_path)

    kept = "8 with 16 (12.5%) or 4 with 32 (12.5%) or 2 with 64 (12.5%)"
    for options, said in ((("--neurons", "13%"), kept), (("--size", "3MB"), "of 8 experts with 128 neurons")):
        done = run(DEMO.path, *options)
        assert done.returncode == 0 and f"{' '.join(options)}: of 8 experts" in done.stdout and said in done.stdout
        assert "fewest" in done.stdout
    for model, options in ((DEMO.path, ("--experts", "50%")), (fine, ("--size", "2MB"))):
        done = run(model, *options)
        assert done.returncode == 0 and "experts: " in done.stdout and "input_rounds: 2" in done.stdout
    for model, options, said in (
        (fine, ("--neurons", "13%"), "in this family other parts' width follows from theirs"),
        (
            DEMO.path,
            ("--neurons", "0.5%"),
            "--neurons 0.5%: genome.neuron_share: 0.005 of the neurons can't be",
        ),
    ):
        done = run(model, *options)
        assert done.returncode == 2 and said in done.stderr
    for options, found in ((("--neurons", "13%"), "fewest"), (("--experts", "50%"), "hope")):
        done = run(DEMO.path, "--custom-code", *options)
        assert done.returncode == 0 and found in done.stdout


def test_with_many_experts_only_formulas_are_compared(
    tmp_path: Path, in_process: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moevolve.search.shrink.settings._MOST_CHOICES", 39)  # the model has 5 layers of 8
    (tmp_path / "text.txt").write_text("\n\n".join(f"{n} " + "word " * 90 for n in range(100)))
    command = ("shrink", DEMO.path, "--data", "text.txt", "-o", "small", "--dry-run", "--experts", "50%")
    for options, said in (((), "input_rounds: 2"), (("--repair", "none"), "evaluations: 4\n")):
        done = in_process(*command, *options, cwd=tmp_path)
        assert done.returncode == 0 and "experts: 4\n" in done.stdout and said in done.stdout
    done = in_process(*command, "--repair", "none", "--evaluations", "60", cwd=tmp_path)
    assert done.returncode == 0 and "evaluations: 60\n" in done.stdout


def test_experts_of_text_models_that_nothing_loads_alone_keep_their_width(tmp_path: Path, in_process: Any) -> None:
    random_model("step3p5", seed=0).save_pretrained(tmp_path / "model")
    word_tokenizer(["word", *map(str, range(9))]).save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("\n\n".join(f"{n} " + "word " * 90 for n in range(100)))
    command = ("shrink", "model", "--data", "text.txt", "-o", "small", "--dry-run", "--set", "model.device=cpu")
    done = in_process(*command, "--experts", "4", cwd=tmp_path)
    assert done.returncode == 0 and "input_rounds: 2" in done.stdout
    done = in_process(*command, "--neurons", "50%", cwd=tmp_path)
    assert done.returncode == 2 and "a model whose text part transformers loads alone" in done.stderr


def test_routers_are_mapped_where_a_pruned_one_is_a_smaller_one() -> None:
    mixtral, olmoe, deepseek_v3 = RoutingRule(True), RoutingRule(False), RoutingRule(True, "sigmoid")
    gpt_oss = RoutingRule(True, "softmax_of_chosen")
    # OLMoE's pruned routers would keep the full softmax's scale.
    spaces = [stock_space(rule) for rule in (mixtral, olmoe, deepseek_v3, gpt_oss)]
    assert spaces == ["probs", "logits", "probs", "logits"]
