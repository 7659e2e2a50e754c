"""Several EEP edits on one resident model at once: whose tokens are routed how, and to which experts.

Tokens come candidate by candidate, as many of each. Candidates without merged experts point into the resident
originals; where any has some, all have their experts in one stacked buffer, one candidate's after the other's.

Feed-forward blocks run on every candidate's tokens by themselves, as they do for it alone, except where a token's
result has the same bits whoever runs along with it: on a CPU it hasn't in the products per expert, nor in activations
whose vectorised loops leave a rest, nor in gates of one output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from moevolve.kernels.routing_population import TokenOwners, route_mapped_by_owner, route_selected_by_owner
from moevolve.workers.edits.apply_eep import EepApplicator
from moevolve.workers.edits.eep import EepEdit
from moevolve.workers.edits.experts import LayerExperts
from moevolve.workers.edits.router import EditableRouter, Routed, RoutingPlan
from moevolve.workers.edits.tensors import host_tensor

Company = tuple[object, ...]


@dataclass
class Turn:
    """Whose tokens the model runs on while several candidates are on it.

    Attributes:
        count: candidates P.
        place: the one whose tokens alone there are; None while there are as many tokens of each, one candidate's after
            the other's.
    """

    count: int
    place: int | None = None


def company_of(edit: EepEdit) -> Company:
    """Edits of equal company can be on a model together; a property of each edit by itself."""
    aligned = None if edit.alignment is None else edit.alignment.fingerprint
    return merges(edit), edit.router_mapping.shape, edit.active, edit.router_space, aligned


def merges(edit: EepEdit) -> bool:
    """Whether any of its layers has merged experts."""
    return not bool(edit.one_hot_merging.all())


class PopulationPlan:
    """How one layer routes the tokens of P candidates."""

    def __init__(self, plans: Sequence[RoutingPlan], slots: Tensor, turn: Turn) -> None:
        """Take every candidate's plan.

        Args:
            plans: one per candidate; their slots are left alone.
            slots: where each candidate's new experts lie in the layer's expert tensors, int64 [P, n'].
            turn: whose tokens come.
        """
        self._plans = tuple(replace(plan, slots=own) for plan, own in zip(plans, slots, strict=True))
        self._slots = slots
        self._turn = turn
        self._selected = _stacked([plan.selected for plan in plans])
        self._mappings = _stacked([plan.mapping for plan in plans])
        self._biases = _stacked([plan.correction for plan in plans])
        self._alike = len({(plan.skip_below, plan.logits_space) for plan in plans}) == 1
        self._owners: dict[int, TokenOwners] = {}

    def route(self, router: EditableRouter, hidden: Tensor) -> Routed:
        """Route tokens [tokens, hidden]; see `EditableRouter.forward`."""
        if self._turn.place is not None:
            return router.follow(self._plans[self._turn.place], hidden)
        if not self._alike or (self._selected is None and self._mappings is None):
            routed = zip(self._plans, hidden.chunk(self._turn.count), strict=True)
            parts = [router.follow(plan, part) for plan, part in routed]
            # Logits may be of all experts or of the retained ones only; blocks read none.
            return parts[0][0], torch.cat([part[1] for part in parts]), torch.cat([part[2] for part in parts])
        return self._route_all(router, hidden)

    def _route_all(self, router: EditableRouter, hidden: Tensor) -> Routed:
        """All candidates' tokens at once, whose mappings are of one kind."""
        owners, plan, logits = self._owners_of(hidden), self._plans[0], router.original_logits(hidden)
        if self._selected is not None:
            weights, chosen = route_selected_by_owner(
                logits,
                self._selected,
                owners,
                plan.active,
                router.rule,
                plan.logits_space,
                plan.skip_below,
                biases=self._biases,
            )
        else:
            assert self._mappings is not None
            weights, chosen = route_mapped_by_owner(
                logits, self._mappings, owners, plan.active, router.rule, plan.skip_below, biases=self._biases
            )
        return logits, router.as_weights(weights, logits), self._slots[owners.owner].gather(1, chosen)

    def _owners_of(self, hidden: Tensor) -> TokenOwners:
        """Of so many tokens, made once."""
        each = hidden.shape[0] // self._turn.count
        if each not in self._owners:
            rows = torch.arange(hidden.shape[0], device=hidden.device)
            self._owners[each] = TokenOwners(rows // each, rows.split(each))
        return self._owners[each]


class EepPopulation:
    """Puts several edits on the model of an `EepApplicator`, and takes them off."""

    def __init__(self, applicator: EepApplicator, blocks: Sequence[nn.Module]) -> None:
        """Take a model.

        Args:
            applicator: its own.
            blocks: its feed-forward blocks, of experts or dense, that take hidden states [rows, columns, hidden].
        """
        self._on = applicator
        self._blocks = tuple(blocks)

    def apply(self, edits: Sequence[EepEdit]) -> Turn:
        """Make edits of one company on the unedited model.

        Args:
            edits: each of which `EepApplicator.check` lets pass.

        Returns:
            Where to say whose tokens come.

        Raises:
            UserError: the device has no room for their experts.
        """
        if len({company_of(edit) for edit in edits}) != 1:
            raise ValueError("edits of different companies can't be on a model together")
        turn = Turn(len(edits))
        plans = [self._on.plans(edit) for edit in edits]
        for layer, (router, experts) in enumerate(zip(self._on.routers, self._on.experts, strict=True)):
            shared = not experts.on_host and all(edit.one_hot_merging[layer] for edit in edits)
            own = [each[layer] for each in plans]
            if shared:
                experts.show_originals(edits[0].alignment)
                slots = torch.stack([plan.slots for plan in own if plan.slots is not None])
            else:
                slots = self._stack(experts, edits, layer)
            router.population = PopulationPlan(own, slots, turn)
        if not all(experts.rows_stand_alone for experts in self._on.experts):
            for block in self._blocks:
                _run_in_turn(block, turn)
        return turn

    def revert(self) -> None:
        """Bring back the unedited model, bit for bit."""
        for block in self._blocks:
            block.__dict__.pop("forward", None)
        for router in self._on.routers:
            router.population = None
        self._on.revert()

    def _stack(self, experts: LayerExperts, edits: Sequence[EepEdit], layer: int) -> Tensor:
        """Give every candidate its own copies or merged experts; gives their slots."""
        retained = edits[0].retained
        slots = np.tile(np.arange(retained), (len(edits), 1))
        merging = np.stack([edit.expert_merging[layer] for edit in edits])
        one_hot = [bool(edit.one_hot_merging[layer]) for edit in edits]
        if experts.on_host and all(one_hot):
            experts.show_selected(merging.argmax(axis=2).flatten().tolist(), edits[0].alignment)
        else:
            for place in np.flatnonzero(one_hot) if not experts.on_host else ():
                # Alone it would use the originals: tokens are sorted by expert, and the order must be the same.
                kept = merging[place].argmax(axis=1)
                merging[place] = merging[place][np.argsort(kept, kind="stable")]
                slots[place] = np.searchsorted(np.sort(kept), kept)
            experts.show_stacked(host_tensor(merging), edits[0].alignment)
        slots += retained * np.arange(len(edits))[:, None]
        return host_tensor(slots).to(experts.device)


def _run_in_turn(block: nn.Module, turn: Turn) -> None:
    """Let a block see one candidate's tokens after the other's, until its own `forward` is put back."""
    whole: Callable[..., Any] = block.forward

    def forward(hidden_states: Tensor, *rest: Any, **named: Any) -> Any:
        if turn.place is not None:
            return whole(hidden_states, *rest, **named)
        # A selection of positions (`moevolve.workers.lean`) lies in one row; there are more in a shared pass.
        dim = 1 if hidden_states.shape[0] == 1 else 0
        outputs = []
        try:
            for place, part in enumerate(hidden_states.chunk(turn.count, dim)):
                turn.place = place
                outputs.append(whole(part, *rest, **named))
        finally:
            turn.place = None
        if not isinstance(outputs[0], tuple):
            return torch.cat(outputs, dim)
        # What comes beside the hidden states (router logits) nobody reads.
        return (torch.cat([output[0] for output in outputs], dim), *outputs[0][1:])

    block.forward = forward


def _stacked(parts: Sequence[Tensor | None]) -> Tensor | None:
    """One tensor [P, ...], if every candidate has one."""
    there = [part for part in parts if part is not None]
    return torch.stack(there) if len(there) == len(parts) else None
