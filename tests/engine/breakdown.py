"""What llama.cpp itself counts for a context, to the byte: an oracle beside its log.

``llama_get_memory_breakdown`` is no C function: it returns a ``std::map`` of buffer types. The walk below knows how
libstdc++ on a 64-bit machine lays one out, and leaks its few nodes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import llama_cpp.llama_cpp as native
import pytest
from llama_cpp import _ggml

_SYMBOL = "_Z26llama_get_memory_breakdownPK13llama_context"


def memory_breakdown(context: int) -> dict[str, tuple[int, int, int]]:
    """For each buffer type: bytes of the model, of the context's cells and states, of the compute buffers."""
    function = getattr(native._lib, _SYMBOL, None)
    if function is None:
        pytest.skip("this build of llama.cpp does not export its memory breakdown")
    result = (ctypes.c_uint64 * 6)()  # the map: comparator, header node (colour, root, left, right), number of nodes
    function.restype, function.argtypes = None, [ctypes.c_void_p, ctypes.c_void_p]
    function(result, context)
    name = _ggml.libggml.ggml_backend_buft_name
    name.restype, name.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
    found = {name(key).decode(): sizes for key, *sizes in _nodes(result[2])}
    assert len(found) == result[5]
    return {key: (sizes[0], sizes[1], sizes[2]) for key, sizes in found.items()}


def _nodes(at: int) -> Iterator[list[int]]:
    """Key and three sizes of each node of the tree whose root is at ``at``: colour, parent, left, right come before."""
    if at:
        words = (ctypes.c_uint64 * 8).from_address(at)
        yield from _nodes(words[2])
        yield list(words[4:8])
        yield from _nodes(words[3])
