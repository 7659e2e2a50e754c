"""What profiles one model in a child process, which `moevolve.workers.profiling.run` starts."""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from moevolve.evaluators.errors import UserError, opening
from moevolve.workers.contract.capacity import free_bytes, release_freed_memory
from moevolve.workers.families.decoder import cache_name
from moevolve.workers.families.registry import register_class
from moevolve.workers.profiling.costs import active_parameters
from moevolve.workers.profiling.report import LoadReply, MeasureReply, ProfiledModel, ProfileSettings

# Steps of a prime number reach all tokens of a vocabulary, whatever its size.
_STRIDE, _OFFSET = 7919, 13
# The model, once there is one.
_LOADED: list[ProfiledProcess] = []


def load(checkpoint: ProfiledModel, settings: ProfileSettings) -> LoadReply:
    """Load the model that this process measures.

    Raises:
        UserError: The checkpoint can't be loaded, or a CUDA device or room on it is missing.
    """
    with _room():
        _LOADED.append(ProfiledProcess(checkpoint, settings))
    return _LOADED[0].loaded


def measure(batch_size: int) -> MeasureReply:
    """Run a batch once with the loaded model.

    Raises:
        UserError: The GPU has no room for it.
    """
    with _room():
        return _LOADED[0].measure(batch_size)


@contextmanager
def _room() -> Iterator[None]:
    try:
        yield
    except torch.cuda.OutOfMemoryError:
        raise UserError("the GPU has no room for it; use smaller --batch-sizes") from None


class ProfiledProcess:
    """One model as plain `transformers` loads it, without our engine.

    Raises:
        UserError: The checkpoint can't be loaded, or a CUDA device is missing.
    """

    def __init__(self, checkpoint: ProfiledModel, settings: ProfileSettings) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        if settings.device == "cuda" and not torch.cuda.is_available():
            raise UserError("--device cuda requires a CUDA device; use auto or cpu")
        on_cuda = settings.device != "cpu" and torch.cuda.is_available()
        self._settings = settings
        self._device = torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        hub: dict[str, object] = {"revision": checkpoint.revision or "main"}
        hub["trust_remote_code"] = checkpoint.trust_remote_code
        path = checkpoint.path
        if path.endswith(".gguf"):
            file = Path(path).resolve()
            path, hub["gguf_file"] = str(file.parent), file.name
        with opening("it doesn't load"):
            config = AutoConfig.from_pretrained(path, **hub)
            register_class(config)
            with torch.device("meta"):
                # Imports the modelling code, whose memory isn't the model's.
                AutoModelForCausalLM.from_config(config, trust_remote_code=checkpoint.trust_remote_code)
            _warm_up(self._device)
            self._memory = _PeakMemory(self._device)
            spread = checkpoint.device_map if self._device.type == "cuda" else None
            model = AutoModelForCausalLM.from_pretrained(
                path, dtype=settings.dtype, use_safetensors=True, device_map=spread, **hub
            )
            if not spread:
                model.to(self._device)
            self.model = model.eval()
        _release_memory()
        self.loaded = LoadReply(
            parameters=sum(each.numel() for each in model.parameters()),
            active_parameters=active_parameters(model),
            weight_bytes=sum(each.nbytes for each in (*model.parameters(), *model.buffers())),
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
    def measure(self, batch_size: int) -> MeasureReply:
        """Run a batch once. Decoding is greedy and doesn't stop at end tokens."""
        tokens, mask = self._prompts(batch_size)
        cache = cache_name(self.model)
        gc.collect()
        self._memory.start()
        began = self._clock()
        found = self.model(input_ids=tokens, use_cache=True, logits_to_keep=1, **_padded(mask, tokens.shape[1]))
        chosen = found.logits[:, -1:].argmax(dim=-1)
        prefilled = self._clock()
        for _ in range(self._settings.new_tokens):
            mask = None if mask is None else torch.nn.functional.pad(mask, (0, 1), value=1)
            further = {cache: getattr(found, cache), "use_cache": True}
            found = self.model(input_ids=chosen, **further, **_padded(mask, 1))
            chosen = found.logits[:, -1:].argmax(dim=-1)
        decoded = self._clock()
        return MeasureReply(prefilled - began, decoded - prefilled, self._memory.peak())

    def _prompts(self, batch_size: int) -> tuple[Tensor, Tensor | None]:
        """Token ids of the prompts, padded on the left, and the mask, 1 for tokens; int64 [batch, longest] each.

        The mask is None if nothing is padded. Arbitrary prompts go through the vocabulary in large steps.
        """
        device = next(self.model.get_input_embeddings().parameters()).device
        if self._settings.prompts is None:
            length = self._settings.prompt_tokens
            steps = torch.arange(batch_size * length) * _STRIDE + _OFFSET
            return (steps % int(self.model.config.vocab_size)).view(batch_size, length).to(device), None
        prompts = self._settings.prompts.batch(batch_size)
        longest = max(map(len, prompts))
        rows = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
        padding = torch.tensor([longest - len(prompt) for prompt in prompts], device=device).unsqueeze(1)
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


def _warm_up(device: torch.device) -> None:
    """Load and run a tiny model, so that memory of libraries and the device isn't counted as the profiled model's."""
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=1)).save_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder)
        tokens = torch.zeros(1, 4, dtype=torch.int64, device=device)
        model.to(device)(input_ids=tokens, use_cache=True).logits.sum().item()
    matrix = torch.ones(512, 512, device=device)
    torch.softmax(matrix @ matrix, dim=-1).sum().item()


class _PeakMemory:
    """The peak memory of this process, which must be created right before the model is loaded.

    On CUDA it is `torch.cuda.max_memory_allocated`, summed over devices: weights, activations and KV cache. On the CPU
    it is the peak resident set, reset before every run, minus the resident set right before the model was loaded. It
    includes memory that the allocator keeps from earlier, smaller runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._devices = range(torch.cuda.device_count() if device.type == "cuda" else 0)
        _release_memory()
        self._baseline = _process_bytes("VmRSS")

    def start(self) -> None:
        for index in self._devices:
            torch.cuda.reset_peak_memory_stats(index)
        try:
            Path("/proc/self/clear_refs").write_text("5")  # 5 resets VmHWM; see man 5 proc
        except OSError:
            # Without a reset the peak would be that of loading the model.
            self._baseline = None

    def peak(self) -> int | None:
        """Peak memory since `start` in bytes; None if the system doesn't report it."""
        if self._devices:
            return sum(map(torch.cuda.max_memory_allocated, self._devices))
        highest = _process_bytes("VmHWM")
        # Noise could make the difference negative for tiny models.
        return None if highest is None or self._baseline is None else max(0, highest - self._baseline)


def _release_memory() -> None:
    """Return freed host memory, such as that of loading the model, to the system."""
    gc.collect()
    release_freed_memory()


def _process_bytes(field: str) -> int | None:
    """Return a field of this process's status in /proc, converted from kB to bytes; None on systems without it."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")), None)
