"""llamakv keeps what a language model has already read."""

__version__ = "0.1.0"
