"""Errors a user can act on. The CLI prints their one sentence and exits with status 1, without a traceback."""


class SpecCompileError(Exception):
    """Base of all errors that name what is wrong, where, and what to do about it."""


class TreeError(SpecCompileError):
    """A token tree that is not prefix-closed, not in parents-first order, or unreadable."""


class SettingsError(SpecCompileError):
    """A number of a drafting method that is out of range."""


class BundleError(SpecCompileError):
    """A bundle that is missing, altered, unsafe, or written by another version."""


class CheckpointError(SpecCompileError):
    """A model or heads checkpoint that cannot be read or does not match its config or its target."""


class TraceError(SpecCompileError):
    """A model that cannot be turned into a faithful graph."""


class EngineError(SpecCompileError):
    """A graph that TensorRT refuses, or reads as something else than it says."""


class ProofError(SpecCompileError):
    """A finished graph that disagrees with eager PyTorch or with plain decoding."""


class GenerationError(SpecCompileError):
    """A request that cannot be served: empty prompt, no room in the cache, unusable logits."""
