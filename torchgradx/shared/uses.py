"""The uses of one forward: which parameters they read, and from which nodes of its graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from ..graph.nodes import Graph, Node
from ..layers.rules import Layer
from ..ops import NATIVE
from ..sites.native import NativeSite
from ..sites.rerun import FallbackSite
from ..sites.site import Site
from .frontier import LiftPlan
from .stations import Leaf

Use = tuple[int, Sequence[int], Node, int]  # (site, sizes, node of its output, output of the node)


class Uses:
    """A place p in the table of parameters, read beside the calls of its modules, is use -1 - p."""

    def __init__(
        self,
        layers: Sequence[Layer],
        parameters: Any,
        uses: Sequence[Use],
        sites: Sequence[Site],
        outputs: Sequence[Tensor],
    ) -> None:
        self._layers, self._tensors, self._sites = layers, parameters.wholes(), sites
        self._uses, self._outputs = uses, outputs
        self._every = {place for layer in layers for place in layer.parameters}

    def node(self, k: int) -> Node:
        """Return the node of a use's output."""
        return self._uses[k][2]

    def have_nodes(self) -> bool:
        return all(node is not None for _, _, node, _ in self._uses)

    def beside(self) -> list[int]:
        """Return uses of modules that would run again, and share their parameters with none that
        would be run again all the same."""
        able = {k: isinstance(s, FallbackSite) and s.by_nodes for k, s in enumerate(self._sites)}
        others = {place for site, *_ in self._uses if not able[site] and not self._is_plain(site)
                  for place in self._layers[site].parameters}  # fmt: skip
        return [k for k, (site, _, node, _) in enumerate(self._uses)
                if able[site] and node is not None
                and others.isdisjoint(self._layers[site].parameters)]  # fmt: skip

    def _is_plain(self, site: int) -> bool:
        return isinstance(self._sites[site], NativeSite) and not self._layers[site].role

    def graph(
        self, mixing: Collection[int], beside: Collection[int], places: set[int] | None = None
    ) -> tuple[Graph, set[int]]:
        """Return the graph without modules' own edges to the parameters at `places` (None: to any),
        and the places of these."""
        graph, nodes, others = Graph(self._outputs), dict[int, set[Node]](), set[int]()
        places = self._every if places is None else places
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
        called = {
            place
            for place in places & nodes.keys() - others
            if self._tensors[place].requires_grad
            and graph.without(get_gradient_edge(self._tensors[place]).node, nodes[place])
        }
        return graph, called

    def read(self, graph: Graph, called: set[int], beside: Sequence[int]) -> list[int]:
        """Return parameters that the forward reads beside the calls of their modules."""
        used = {place for site, *_ in self._uses for place in self._layers[site].parameters}
        found = {place for k in beside for place in self.places(k)}
        read = [-1 - place for place in sorted((self._every - used | called) - found)]
        return [k for k in read if self.own(k, graph)]

    def site(self, k: int) -> int:
        if k >= 0:
            return self._uses[k][0]
        return next(s for s, layer in enumerate(self._layers) if -1 - k in layer.parameters)

    def places(self, k: int) -> tuple[int, ...]:
        """Return the parameters of a use."""
        return self._layers[self._uses[k][0]].parameters if k >= 0 else (-1 - k,)

    def own(self, k: int, graph: Graph) -> tuple[Node, ...]:
        """Return the ends of the graph that are parameters of a use."""
        tensors = (self._tensors[place] for place in self.places(k))
        nodes = [get_gradient_edge(p).node for p in tensors if p.requires_grad]
        return tuple(node for node in nodes if node in graph.parents)

    def leaves(self, plan: LiftPlan, called: set[int]) -> dict[int, Leaf]:
        """Return the parameters to serve, by their tensors' ids."""
        lifted = dict(plan.starts)
        others = {place for k in range(len(self._uses)) if k not in lifted
                  for place in self.places(k)}  # fmt: skip
        calls = Counter(
            place for k, own in lifted.items() if own and k >= 0 for place in set(self.places(k))
        )
        leaves = {}
        for k, own in lifted.items():
            for place in self.places(k):
                alone = place not in others
                counted = place in called or (own and alone and NATIVE)
                leaf = Leaf(place, alone, calls[place], int(counted))
                leaves[id(self._tensors[place])] = leaf
        return leaves
