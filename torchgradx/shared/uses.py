"""The uses of one forward: the parameters that each reads, and its nodes in the graph.

A use has an index k: its place among the calls of layers. A read of the parameter at place p beside
the calls of its modules is the use -1 - p.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from ..extension import NATIVE
from ..graph.layout import is_python
from ..graph.nodes import Graph, Node
from ..layers.rules import Layer
from ..sites.native import NativeSite
from ..sites.rerun import FallbackSite
from ..sites.site import Site
from .frontier import LiftPlan
from .stations import Leaf

Use = tuple[int, Sequence[int], Node, int]  # (site, sizes, node of its output, output of the node)


class Uses:
    """The uses of one forward of a model, and the outputs of the model."""

    def __init__(
        self,
        layers: Sequence[Layer],
        parameters: Any,
        sites: Sequence[Site],
        uses: Sequence[Use],
        outputs: Sequence[Tensor],
    ) -> None:
        self._layers, self._tensors, self._sites = layers, parameters.wholes(), sites
        self._uses, self._outputs = uses, outputs
        self.nodes = [node for _, _, node, _ in uses]  # of the uses' outputs
        self._all_places = {place for layer in layers for place in layer.parameters}

    def find_beside(self) -> list[int]:
        """Return the uses of modules that would run again but may be served by their nodes.
        Their parameters have no use that must run again anyhow."""
        by_nodes = [isinstance(site, FallbackSite) and site.by_nodes for site in self._sites]
        others = {place for site, *_ in self._uses
                  if not by_nodes[site] and not self._is_plain(site)
                  for place in self._layers[site].parameters}  # fmt: skip
        return [k for k, (site, _, node, _) in enumerate(self._uses)
                if by_nodes[site] and node is not None
                and others.isdisjoint(self._layers[site].parameters)]  # fmt: skip

    def _is_plain(self, site: int) -> bool:
        return isinstance(self._sites[site], NativeSite) and not self._layers[site].role

    def prune_graph(
        self, mixing: Collection[int], beside: Collection[int], places: set[int] | None = None
    ) -> tuple[Graph, set[int]]:
        """Return the graph without the edges of modules' own calls to the parameters at `places`
        (None: all), and the places whose edges were removed."""
        graph = Graph(self._outputs)
        nodes, others = dict[int, set[Node]](), set[int]()  # of plain calls; with other calls
        places = self._all_places if places is None else places
        if not places:
            return graph, set()
        for k, (site, _, node, _) in enumerate(self._uses):
            called = places.intersection(self._layers[site].parameters)
            plain = called and self._is_plain(site) and node in graph.parents and k not in mixing
            for place in called:
                if plain:
                    nodes.setdefault(place, set()).add(node)
                elif k not in beside:
                    others.add(place)
        trained = [p for p in places & nodes.keys() - others if self._tensors[p].requires_grad]
        leaves = {p: get_gradient_edge(self._tensors[p]).node for p in trained}
        return graph, {p for p, leaf in leaves.items() if graph.without(leaf, nodes[p])}

    def find_reads(self, graph: Graph, called: set[int], beside: Sequence[int]) -> list[int]:
        """Return the uses -1 - p: parameters that are read beside the calls of their modules.
        graph, called: from prune_graph()."""
        # What left no node may run again in a checkpoint.
        may_run_again = None in self.nodes and any(map(is_python, graph.parents))
        used = {place for site, _, node, _ in self._uses if node is not None or may_run_again
                for place in self._layers[site].parameters}  # fmt: skip
        served = {place for k in beside for place in self.places(k)}
        reads = [-1 - place for place in sorted((self._all_places - used | called) - served)]
        return [k for k in reads if self.own(k, graph)]

    def site(self, k: int) -> int:
        if k >= 0:
            return self._uses[k][0]
        return next(s for s, layer in enumerate(self._layers) if -1 - k in layer.parameters)

    def places(self, k: int) -> tuple[int, ...]:
        """Return the places of a use's parameters."""
        return self._layers[self._uses[k][0]].parameters if k >= 0 else (-1 - k,)

    def own(self, k: int, graph: Graph) -> tuple[Node, ...]:
        """Return the nodes of a use's parameters, as far as they are in the graph; complex ones
        have no gradient per sample."""
        tensors = (self._tensors[place] for place in self.places(k))
        nodes = [get_gradient_edge(p).node for p in tensors
                 if p.requires_grad and not p.is_complex()]  # fmt: skip
        return tuple(node for node in nodes if node in graph.parents)

    def leaves(self, plan: LiftPlan, called: set[int]) -> dict[int, Leaf]:
        """Return the leaves that a plan serves, by the ids of the parameters' tensors."""
        lifted = dict(plan.starts)
        others = {place for k in range(len(self._uses)) if k not in lifted
                  for place in self.places(k)}  # fmt: skip
        reruns = (k for k, own in lifted.items() if own and k >= 0)
        calls = Counter(place for k in reruns for place in set(self.places(k)))
        leaves = {}
        for k, own in lifted.items():
            for place in self.places(k):
                is_alone = place not in others
                is_counted = place in called or (own and is_alone and NATIVE)
                leaf = Leaf(place, is_alone, calls[place], int(is_counted))
                leaves[id(self._tensors[place])] = leaf
        return leaves
