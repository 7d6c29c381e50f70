"""Graphs of torch_geometric, with its batch vector as ids, against a loop over single graphs."""

import warnings

import pytest
import torch
from attach_oracle import close_named
from segment_models import CLASSES, SIZES, D, Graphs
from test_score_segments import ids_of as batch_of
from test_segments import DOUBLE, joined, loop, norms_of, step, step_where_samples_may_meet
from torch import nn

import torchgradx

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it scripts functions
    pytest.importorskip("torch_geometric.data")
    from torch_geometric import nn as geometric


def mlp(ins, outs):
    return nn.Sequential(nn.Linear(ins, outs), nn.ReLU(), nn.Linear(outs, outs))


CONVOLUTIONS = {
    "GCN": geometric.GCNConv,
    "GAT": lambda ins, outs: geometric.GATConv(ins, outs, heads=2, concat=False),
    "GIN": lambda ins, outs: geometric.GINConv(mlp(ins, outs), train_eps=True),
    "SAGE": geometric.SAGEConv,
    "EdgeConv": lambda ins, outs: geometric.EdgeConv(mlp(2 * ins, outs)),
}
POOLS = {"mean": geometric.global_mean_pool, "add": geometric.global_add_pool}


class Net(nn.Module):
    def __init__(self, name, pool="mean"):
        super().__init__()
        self.a, self.b = CONVOLUTIONS[name](D, 8), CONVOLUTIONS[name](8, 8)
        self.out, self.pool = nn.Linear(8, CLASSES), POOLS[pool]

    def forward(self, x, edges, batch):
        h = self.b(self.a(x, edges).relu(), edges).relu()
        return self.out(self.pool(h, batch))


class Batched(Graphs):
    """Graphs as a model of torch_geometric is called on them."""

    def batch(self, model):
        return model(self.x, self.edges, self.ids)

    def alone(self, model, k):
        x = self.x[self.ids == k]
        return model(x, self.own[k], torch.zeros(len(x), dtype=torch.long))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_norms_are_those_of_single_graphs(name, pool, fused):
    model = Net(name, pool).to(DOUBLE)
    with torchgradx.attach(model, sample_ids=batch_of, fused=fused) as probe:
        for k, sizes in enumerate([*SIZES[:2], SIZES[3], SIZES[0]]):
            case = Batched().draw(sizes, torch.Generator().manual_seed(k))
            with probe.paused():
                want = norms_of(loop(model, case, case.loss_of_one))
            step(model, case)
            close_named(probe.norms(per="parameter"), want, 1e-9)
        for spoil in (joined, joined, None):
            step_where_samples_may_meet(probe, model, Batched(), [4, 3, 5], spoil)
