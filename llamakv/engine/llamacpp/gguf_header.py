"""What a GGUF file's header says, read through ggml's own functions (``gguf.h``); nothing else of the file is read."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from llamakv.engine.llamacpp.native import Pointer, bare_reason, native_log
from llamakv.errors import ModelFileError

_MAGIC = b"GGUF"  # gguf.h
_STRING, _ARRAY = 8, 9  # gguf_type in gguf.h
_INTEGERS = {
    0: ("u8", ctypes.c_uint8),
    1: ("i8", ctypes.c_int8),
    2: ("u16", ctypes.c_uint16),
    3: ("i16", ctypes.c_int16),
    4: ("u32", ctypes.c_uint32),
    5: ("i32", ctypes.c_int32),
    10: ("u64", ctypes.c_uint64),
    11: ("i64", ctypes.c_int64),
}
"""gguf_type numbers of whole numbers, how their functions' names end, and their C types."""


def check_is_gguf(path: Path) -> None:
    """Look at the first bytes of a file.

    Raises:
        ModelFileError: it cannot be read, or is not a GGUF file.
    """
    try:
        with path.open("rb") as file:
            magic = file.read(len(_MAGIC))
    except OSError as error:
        raise ModelFileError(f"cannot read the model file {path}: {error.strerror}", path=str(path)) from error
    if magic != _MAGIC:
        raise ModelFileError(f"{path} is not a GGUF model file", path=str(path))


class _InitParams(ctypes.Structure):
    _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p))  # gguf_init_params in gguf.h


class GgufHeader:
    """The keys and the tensor table of one GGUF file; use it in a ``with`` statement."""

    def __init__(self, path: Path) -> None:
        """Read the header.

        Raises:
            ModelFileError: the file cannot be read or is not a GGUF file, or its header is damaged or cut off.
        """
        check_is_gguf(path)
        self._library = _library()
        native_log().clear()
        params = _InitParams(no_alloc=True, ctx=None)
        self._file: Pointer = self._library.gguf_init_from_file(os.fsencode(path), params)
        if not self._file:
            reason = bare_reason(next(iter(native_log().lines), "").strip())
            raise ModelFileError(f"the header of {path} is damaged or cut off: {reason}", path=str(path))

    def text(self, key: str) -> str | None:
        """The text under a key; None where there is none."""
        at = self._library.gguf_find_key(self._file, key.encode())
        if at < 0 or self._library.gguf_get_kv_type(self._file, at) != _STRING:
            return None
        return str(self._library.gguf_get_val_str(self._file, at).decode("utf-8", "replace"))

    def number(self, key: str) -> int | None:
        """The whole number under a key; None where there is none."""
        at = self._library.gguf_find_key(self._file, key.encode())
        if at < 0:
            return None
        kind = _INTEGERS.get(self._library.gguf_get_kv_type(self._file, at))
        return None if kind is None else int(getattr(self._library, f"gguf_get_val_{kind[0]}")(self._file, at))

    def numbers(self, key: str) -> tuple[int, ...] | None:
        """The whole numbers of the array under a key; None where there is none."""
        at = self._library.gguf_find_key(self._file, key.encode())
        if at < 0 or self._library.gguf_get_kv_type(self._file, at) != _ARRAY:
            return None
        kind = _INTEGERS.get(self._library.gguf_get_arr_type(self._file, at))
        if kind is None:
            return None
        n = self._library.gguf_get_arr_n(self._file, at)
        data = self._library.gguf_get_arr_data(self._file, at)
        return tuple((kind[1] * n).from_address(data)) if n else ()

    def length(self, key: str) -> int | None:
        """How many elements the array under a key has; None where there is none."""
        at = self._library.gguf_find_key(self._file, key.encode())
        if at < 0 or self._library.gguf_get_kv_type(self._file, at) != _ARRAY:
            return None
        return int(self._library.gguf_get_arr_n(self._file, at))

    def has_tensor(self, name: str) -> bool:
        """Whether there is a tensor of this name."""
        return bool(self._library.gguf_find_tensor(self._file, name.encode()) >= 0)

    @property
    def tensor_bytes(self) -> int:
        """The size of all tensors."""
        return sum(self._library.gguf_get_tensor_size(self._file, i) for i in self._tensors)

    @property
    def tensor_elements(self) -> int:
        """The numbers in all tensors."""
        n = 0
        for i in self._tensors:
            kind = self._library.gguf_get_tensor_type(self._file, i)
            n_blocks = self._library.gguf_get_tensor_size(self._file, i) // self._library.ggml_type_size(kind)
            n += n_blocks * self._library.ggml_blck_size(kind)
        return n

    @property
    def _tensors(self) -> range:
        return range(self._library.gguf_get_n_tensors(self._file))

    def close(self) -> None:
        """Free it."""
        if self._file:
            self._library.gguf_free(self._file)
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _library() -> Any:
    from llama_cpp import _ggml

    library = _ggml.libggml
    file, index, name = ctypes.c_void_p, ctypes.c_int64, ctypes.c_char_p
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "gguf_init_from_file": (ctypes.c_void_p, [name, _InitParams]),
        "gguf_free": (None, [file]),
        "gguf_find_key": (index, [file, name]),
        "gguf_get_kv_type": (ctypes.c_int, [file, index]),
        "gguf_get_val_str": (ctypes.c_char_p, [file, index]),
        "gguf_get_arr_type": (ctypes.c_int, [file, index]),
        "gguf_get_arr_n": (ctypes.c_size_t, [file, index]),
        "gguf_get_arr_data": (ctypes.c_void_p, [file, index]),
        "gguf_get_n_tensors": (index, [file]),
        "gguf_find_tensor": (index, [file, name]),
        "gguf_get_tensor_size": (ctypes.c_size_t, [file, index]),
        "gguf_get_tensor_type": (ctypes.c_int, [file, index]),
        "ggml_type_size": (ctypes.c_size_t, [ctypes.c_int]),
        "ggml_blck_size": (index, [ctypes.c_int]),
        **{f"gguf_get_val_{suffix}": (kind, [file, index]) for suffix, kind in _INTEGERS.values()},
    }
    for function, (result, arguments) in signatures.items():
        getattr(library, function).restype = result
        getattr(library, function).argtypes = arguments
    return library
