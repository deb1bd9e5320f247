"""Puts a core together: model files → weights → decoder → pool → cache → scheduler."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from engine.config import ServeConfig, format_size
from engine.core.cache import make_cache, make_tiered_cache
from engine.core.core import Core
from engine.core.lower import Lower, LowerConfig, open_store
from engine.core.messages import CoreInfo
from engine.core.runner import CpuRunner
from engine.core.scheduler import Scheduler
from engine.core.transfer import CpuDevice
from engine.errors import ConfigError, ResourceError
from engine.model.config import ModelConfig, check_supported, load_config
from engine.model.decoder import Decoder
from engine.model.fingerprint import fingerprint
from engine.model.library import resolve
from engine.model.weights import default_dtype, load_weights
from kernels.paged_cpu import WINDOW

if TYPE_CHECKING:
    from radix import RadixTree

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


def build_core(config: ServeConfig, secret_check: bytes = b"",
               clock: Callable[[], float] = time.monotonic) -> Built:
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
    print_of_model = fingerprint(files, model, _name(dtype), config.block_size, deterministic_facts=_bit_facts())
    core, runner = assemble(config, decoder, n_slots, max_context, clock, print_of_model, secret_check)
    info = CoreInfo(files.name, model.architecture, _name(dtype), config.device,
                    model.vocab_size, max_context, config.block_size, n_slots, pool_bytes,
                    round(time.perf_counter() - began, 3), **_lower_info(config, core, max_context))
    return Built(core, runner, info)


def assemble(config: ServeConfig, decoder: Decoder, n_slots: int, max_context: int,
             clock: Callable[[], float] = time.monotonic, fingerprint: bytes = b"",
             secret_check: bytes = b"") -> tuple[Core, CpuRunner]:
    """A core over a decoder that is loaded already. Raises StartError where a tier can't be had."""
    model, dtype = decoder.config, decoder.weights.dtype
    runner = CpuRunner(decoder, model, n_slots=n_slots, block_size=config.block_size, dtype=dtype)
    block_bytes = CpuRunner.block_bytes(model, config.block_size, dtype)
    if config.ram or config.nvme is not None:
        lower = LowerConfig(
            block_bytes, config.block_size, config.ram, config.nvme, config.nvme_size or 0, fingerprint, secret_check,
            _name(dtype), persist_within=config.persist_within, nvme_write_limit=config.nvme_write_limit,
            session_idle=config.session_idle, ahead=2 * config.step_tokens // config.block_size + config.max_running)
        cache = make_tiered_cache(config.block_size, clock, _below(lower, runner, clock))
    else:
        cache = make_cache(n_slots, config.block_size, clock)
    scheduler = Scheduler(cache, clock, step_tokens=config.step_tokens, max_running=config.max_running,
                          max_waiting=config.max_waiting)
    core = Core(scheduler, runner, vocab_size=model.vocab_size, max_context=max_context,
                eos_ids=model.eos_ids, fingerprint=fingerprint, clock=clock, block_bytes=block_bytes)
    return core, runner


def _below(config: LowerConfig, runner: CpuRunner,
           clock: Callable[[], float]) -> Callable[[RadixTree], Lower]:
    """What makes the lower tiers for a tree."""
    def make(tree: RadixTree) -> Lower:
        store = open_store(config, runner.n_slots, lambda wake: CpuDevice(runner.pool, wake.set), clock)
        return Lower(tree, store, clock, config)
    return make


def _lower_info(config: ServeConfig, core: Core, max_context: int) -> dict[str, Any]:
    """What CoreInfo says of the tiers, and notes for who starts the server."""
    notes = []
    if config.block_size >= max_context:
        notes.append(f"--block-size {config.block_size} is as long as the longest sequence ({max_context} tokens): no "
                     f"prompts can ever share a whole block; choose a smaller one")
    lower = core.cache.lower
    if lower is None:
        return {"notes": notes}
    return {"tiers": list(core.tiers), "notes": notes + lower.notes(), **lower.sizes()}


def _bit_facts() -> dict[str, str]:
    """What else changes a result's bits on a CPU."""
    return {"torch": torch.__version__, "isa": torch.backends.cpu.get_cpu_capability(),
            "threads": str(torch.get_num_threads()), "attention window": str(WINDOW)}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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
    if config.ram and config.ram < 2 * block:
        raise ResourceError(f"--ram {format_size(config.ram)} holds {config.ram // block} blocks of {block} bytes "
                            f"({config.block_size} tokens); at least 2 are needed, or 0 for no RAM tier")
    free = available_memory()
    if free is not None and n_slots * block + config.ram + WORKING_BYTES > free:
        ram = f" and --ram {format_size(config.ram)}" if config.ram else ""
        raise ResourceError(
            f"--hbm {format_size(config.hbm)}{ram} is more than this machine has: {free / 2**30:.1f} GiB are "
            f"available, and {WORKING_BYTES >> 20} MiB of them are needed to work in; ask for less")
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
