"""The process that profiles one model. `moevolve.workers.profiling.run` starts it; it ends with its connection."""

from __future__ import annotations

import gc
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moevolve.evaluators.errors import UserError
from moevolve.workers.contract.capacity import free_bytes
from moevolve.workers.profiling.costs import model_costs
from moevolve.workers.profiling.memory import PeakMemory
from moevolve.workers.profiling.messages import (
    LoadReply,
    LoadRequest,
    MeasureReply,
    MeasureRequest,
    ProfileSettings,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_STRIDE, _OFFSET = 7919, 13


class ProfiledProcess:
    """One model as plain `transformers` loads it, without our engine."""

    def __init__(self) -> None:
        self._model: PreTrainedModel | None = None
        self._device = torch.device("cpu")
        self._memory: PeakMemory | None = None

    @property
    def model(self) -> PreTrainedModel:
        """The loaded model."""
        assert self._model is not None
        return self._model

    def load(self, request: LoadRequest) -> LoadReply:
        """Load the checkpoint and count its costs.

        Raises:
            UserError: The checkpoint can't be loaded or counted, or there is no CUDA device.
        """
        from transformers import AutoConfig, AutoModelForCausalLM

        checkpoint, settings = request.model, request.settings
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        self._device = _device(settings)
        hub = {"revision": checkpoint.revision or "main", "trust_remote_code": checkpoint.trust_remote_code}
        try:
            config = AutoConfig.from_pretrained(checkpoint.path, **hub)
            with torch.device("meta"):
                # Imports the modelling code, whose memory isn't the model's.
                AutoModelForCausalLM.from_config(config, trust_remote_code=checkpoint.trust_remote_code)
            _warm_up(self._device)
            self._memory = PeakMemory(self._device)
            spread = checkpoint.device_map if self._device.type == "cuda" else None
            model = AutoModelForCausalLM.from_pretrained(
                checkpoint.path, dtype=settings.dtype, use_safetensors=True, device_map=spread, **hub
            )
            if not spread:
                torch.nn.Module.to(model, self._device)
            self._model = model.eval()
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise UserError(f"it doesn't load: {str(error).strip().splitlines()[0]}") from error
        self._memory.release()
        costs = model_costs(model, settings.prompt_tokens)
        return LoadReply(
            costs.parameters,
            costs.active_parameters,
            costs.weight_bytes,
            costs.linear_flops,
            costs.attention_flops,
            model_type=str(model.config.model_type),
            dtype=str(model.dtype).removeprefix("torch."),
            device=self._device.type,
            device_name=torch.cuda.get_device_name() if self._device.type == "cuda" else "CPU",
            threads=torch.get_num_threads(),
            attention=str(getattr(model.config, "_attn_implementation", None)),
            experts=str(getattr(model.config, "_experts_implementation", None)),
            free_bytes=sum(map(free_bytes, {parameter.device for parameter in model.parameters()})),
        )

    @torch.inference_mode()
    def measure(self, request: MeasureRequest) -> MeasureReply:
        """Run a batch once. Decoding is greedy and doesn't stop at end tokens."""
        assert self._memory is not None
        model: Any = self.model
        tokens, mask = self._prompts(request)
        gc.collect()
        self._memory.start()
        began = self._clock()
        found = model(input_ids=tokens, use_cache=True, logits_to_keep=1, **_padded(mask, tokens.shape[1]))
        chosen = found.logits[:, -1:].argmax(dim=-1)
        prefilled = self._clock()
        for _ in range(request.new_tokens):
            mask = None if mask is None else torch.nn.functional.pad(mask, (0, 1), value=1)
            further = {"past_key_values": found.past_key_values, "use_cache": True}
            found = model(input_ids=chosen, **further, **_padded(mask, 1))
            chosen = found.logits[:, -1:].argmax(dim=-1)
        decoded = self._clock()
        return MeasureReply(prefilled - began, decoded - prefilled, self._memory.peak())

    def _prompts(self, request: MeasureRequest) -> tuple[Tensor, Tensor | None]:
        """Token ids of the prompts, padded on the left, and the mask, 1 for tokens; int64 [batch, longest] each.

        The mask is None if nothing is padded. Arbitrary prompts go through the vocabulary in large steps.
        """
        device = next(self.model.get_input_embeddings().parameters()).device
        if not request.prompts:
            steps = torch.arange(request.batch_size * request.prompt_tokens) * _STRIDE + _OFFSET
            tokens = (steps % int(self.model.config.vocab_size)).view(request.batch_size, request.prompt_tokens)
            return tokens.to(device), None
        longest = max(map(len, request.prompts))
        rows = [[0] * (longest - len(prompt)) + list(prompt) for prompt in request.prompts]
        padding = torch.tensor([longest - len(prompt) for prompt in request.prompts], device=device).unsqueeze(1)
        mask = (torch.arange(longest, device=device) >= padding).long()
        return torch.tensor(rows, device=device), None if mask.all() else mask

    def _clock(self) -> float:
        if self._device.type == "cuda":
            for index in range(torch.cuda.device_count()):
                torch.cuda.synchronize(index)
        return time.perf_counter()


def _padded(mask: Tensor | None, columns: int) -> dict[str, Tensor]:
    """Arguments of a pass over the last columns for padded prompts: mask and position ids; none without a mask."""
    if mask is None:
        return {}
    positions = (mask.cumsum(dim=1) - 1).clamp_min(0)
    return {"attention_mask": mask, "position_ids": positions[:, -columns:]}


def _device(settings: ProfileSettings) -> torch.device:
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: there is no CUDA device; use auto or cpu")
    wanted = settings.device != "cpu" and torch.cuda.is_available()
    return torch.device("cuda", torch.cuda.current_device()) if wanted else torch.device("cpu")


def _warm_up(device: torch.device) -> None:
    """Load and run a tiny model, so that memory of libraries and the device isn't counted as the profiled model's."""
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=1)).save_pretrained(folder)
        model: Any = torch.nn.Module.to(AutoModelForCausalLM.from_pretrained(folder), device)
        tokens = torch.zeros(1, 4, dtype=torch.int64, device=device)
        model(input_ids=tokens, use_cache=True).logits.sum().item()
    matrix = torch.ones(512, 512, device=device)
    torch.softmax(matrix @ matrix, dim=-1).sum().item()


def serve(connection: Connection) -> None:
    """Answer requests with replies or a UserError, until the other end of the connection is closed."""
    process = ProfiledProcess()
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        try:
            connection.send(process.load(request) if isinstance(request, LoadRequest) else process.measure(request))
        except UserError as error:
            connection.send(error)
        except torch.cuda.OutOfMemoryError:
            connection.send(UserError("the GPU has no room for it; use smaller --batch-sizes, or --apart"))


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
