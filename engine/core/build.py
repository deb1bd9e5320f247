"""Puts a core together: model files → weights → decoder → pool → cache → scheduler."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from engine.config import ServeConfig, format_size
from engine.core.cache import make_cache
from engine.core.core import Core
from engine.core.messages import CoreInfo
from engine.core.runner import CpuRunner
from engine.core.scheduler import Scheduler
from engine.errors import ConfigError, ResourceError
from engine.model.config import ModelConfig, check_supported, load_config
from engine.model.decoder import Decoder
from engine.model.library import resolve
from engine.model.weights import default_dtype, load_weights
from kernels.paged_cpu import WINDOW

log = logging.getLogger("trunkline.core")

#: None: what this CPU computes fast in.
DTYPES: dict[str, torch.dtype | None] = {
    "auto": None, "bfloat16": torch.bfloat16, "float32": torch.float32}
#: What a step needs beside pool and weights (activations, masks, gathered blocks), roughly.
WORKING_BYTES = 256 << 20


class Built(NamedTuple):
    """A core, its runner (tests read blocks through it) and what it says of itself."""

    core: Core
    runner: CpuRunner
    info: CoreInfo


def build_core(config: ServeConfig, clock: Callable[[], float] = time.monotonic) -> Built:
    """Load the model and allocate the pool. Raises StartError with what is wrong and what to do."""
    began = time.perf_counter()
    torch.set_num_threads(config.threads or os.cpu_count() or 1)
    files = resolve(config.model, download=False)
    model = load_config(files)
    max_context = _limits(config, model)
    check_supported(model, max_context)
    dtype = DTYPES[config.dtype] or default_dtype()
    weights = load_weights(files, model, dtype)
    if not weights.stable:
        log.warning("on this machine a row's bits depend on its batch (no padding of small batches helps): a cache "
                    "hit may differ from a cold run in the last bits")
    decoder = Decoder(model, weights, max_context)
    n_slots, pool_bytes = _pool(config, model, dtype)
    core, runner = assemble(config, decoder, n_slots, max_context, clock)
    info = CoreInfo(files.name, model.architecture, str(dtype).removeprefix("torch."), config.device,
                    model.vocab_size, max_context, config.block_size, n_slots, pool_bytes,
                    round(time.perf_counter() - began, 3))
    return Built(core, runner, info)


def assemble(config: ServeConfig, decoder: Decoder, n_slots: int, max_context: int,
             clock: Callable[[], float] = time.monotonic) -> tuple[Core, CpuRunner]:
    """A core over a decoder that is loaded already."""
    model, dtype = decoder.config, decoder.weights.dtype
    runner = CpuRunner(decoder, model, n_slots=n_slots, block_size=config.block_size, dtype=dtype)
    cache = make_cache(n_slots, config.block_size, clock)
    scheduler = Scheduler(cache, clock, step_tokens=config.step_tokens, max_running=config.max_running,
                          max_waiting=config.max_waiting)
    core = Core(scheduler, runner, vocab_size=model.vocab_size, max_context=max_context,
                eos_ids=model.eos_ids, fingerprint=_fingerprint(model, dtype, config.block_size), clock=clock,
                block_bytes=CpuRunner.block_bytes(model, config.block_size, dtype))
    return core, runner


def _limits(config: ServeConfig, model: ModelConfig) -> int:
    """The longest sequence; raises ConfigError where options do not fit each other or the model."""
    if WINDOW % config.block_size:
        raise ConfigError(f"--block-size {config.block_size}: it must divide {WINDOW} (8, 16, 32, 64, 128, …)")
    if config.max_running > config.step_tokens:
        raise ConfigError(f"--max-running {config.max_running} is more than --step-tokens {config.step_tokens}: a step "
                          f"computes a token for each running sequence")
    if config.max_context is None:
        return model.max_position
    if config.max_context > model.max_position:
        raise ConfigError(f"--max-context {config.max_context}: the model was made for {model.max_position} "
                          f"tokens; ask for that or less")
    return config.max_context


def _pool(config: ServeConfig, model: ModelConfig, dtype: torch.dtype) -> tuple[int, int]:
    """Slots and bytes of the device pool; refused when it can't hold one block, or the machine can't hold it."""
    block = CpuRunner.block_bytes(model, config.block_size, dtype)
    n_slots = config.hbm // block
    if n_slots < 2:
        raise ResourceError(f"--hbm {format_size(config.hbm)} holds {n_slots} blocks of {block} bytes "
                            f"({config.block_size} tokens); at least 2 are needed, --hbm 1GiB is a good start")
    free = available_memory()
    if free is not None and n_slots * block + WORKING_BYTES > free:
        raise ResourceError(
            f"--hbm {format_size(config.hbm)} is more than this machine has: {free / 2**30:.1f} GiB are available, and "
            f"{WORKING_BYTES >> 20} MiB of them are needed to work in; ask for less")
    return n_slots, n_slots * block


def available_memory() -> int | None:
    """Bytes that can be had without swapping (Linux: MemAvailable); None where that is not known."""
    try:
        with open("/proc/meminfo") as f:
            for line in f:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def _fingerprint(model: ModelConfig, dtype: torch.dtype, block_size: int) -> bytes:
    """Within one process the weights can't change; the digest of the weights joins when blocks leave it."""
    return hashlib.sha256(repr((model, str(dtype), block_size)).encode()).digest()
