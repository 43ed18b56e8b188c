"""`Setting`: the fields of a manifest that tuning changes."""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass, replace
from typing import Any

from speccompile.graphs.settings import LookaheadSettings, LookupSettings
from speccompile.graphs.tree import AdaptiveChain, DraftTree, DynamicTree
from speccompile.runtime import Decoder


@dataclass(frozen=True)
class Setting:
    """A way to draft with the graphs of a bundle."""

    tree: DraftTree
    lookup: LookupSettings | None = None
    lookahead: LookaheadSettings | None = None

    def of(self, decoder: Decoder) -> Decoder:
        """The same loaded graphs with this setting. It keeps no costs, so it drafts in every round."""
        other = copy.copy(decoder)
        manifest = replace(decoder.bundle.manifest, lookup=self.lookup, lookahead=self.lookahead, costs=None)
        other.bundle = replace(decoder.bundle, manifest=replace(manifest, tree=self.tree.to_json()), tree=self.tree)
        other.tree = self.tree
        return other

    @property
    def looks_up(self) -> LookupSettings | None:
        """Prompt lookup, also as the form of lookahead that has no window."""
        if self.lookahead is not None and not self.lookahead.window:
            return LookupSettings(self.lookahead.ngram, self.lookahead.guesses)
        return self.lookup

    def to_json(self) -> dict[str, Any]:
        """As in the manifest; only what is set."""
        others = {"lookup": self.lookup, "lookahead": self.lookahead}
        return {"tree": self.tree.to_json()} | {name: asdict(value) for name, value in others.items() if value}

    def __str__(self) -> str:
        """As the command line writes it, where it can."""
        if (ahead := self.lookahead) is not None and ahead.window:
            return f"lookahead {ahead.window},{ahead.ngram},{ahead.guesses}"
        tree = self.tree
        if isinstance(tree, DynamicTree):
            floor = f"-{tree.floor:g}" if tree.floor else ""
            limits = (("d", tree.depth), ("k", tree.top_k))
            name = f"dynamic-{tree.nodes}{floor}" + "".join(f"-{letter}{n}" for letter, n in limits if n is not None)
        elif isinstance(tree, AdaptiveChain):
            name = f"adaptive-{tree.longest}" + (f"-{tree.confidence:g}" if tree.confidence else "")
        elif len(tree) == tree.max_depth + 1:
            name = f"chain-{tree.max_depth}"
        else:
            name = f"fixed tree of {len(tree)}, depth {tree.max_depth}"
        looked = self.looks_up
        return name if looked is None else f"{name}, lookup of {looked.guesses}"
