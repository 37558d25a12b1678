"""The one implementation of the engine contract: llama.cpp through llama-cpp-python's low-level interface."""

from llamakv.engine.llamacpp.model import LlamaModel

__all__ = ["LlamaModel"]
