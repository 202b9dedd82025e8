"""An ensemble as one vectorised call of a module on stacked parameters, and pairs by nested vmap. Right: exact."""

import torch
from torch import nn
from torch.func import functional_call, stack_module_state


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        members = [nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)) for _ in range(3)]
        stacked, _ = stack_module_state(members)
        self.members = nn.ParameterDict({name.replace(".", "_"): nn.Parameter(t) for name, t in stacked.items()})
        self.names, self.one = list(stacked), [members[0].to("meta")]
        self.first, self.head = nn.Linear(8, 8), nn.Linear(4, 4)

    def forward(self, x):
        parameters = {name: self.members[name.replace(".", "_")] for name in self.names}
        results = torch.vmap(lambda p, a: functional_call(self.one[0], p, (a,)), in_dims=(0, None))(
            parameters, self.first(x)
        )
        # Each sample: the distances of its members from each other.
        pairs = torch.vmap(torch.vmap(lambda a, b: (a - b).square().sum(), (None, 0)), (0, None))
        distances = torch.vmap(lambda members: pairs(members, members), in_dims=1)(results)
        return self.head(results.mean(0)).square().mean() + 0.1 * distances.mean()


def model():
    return Model()


def batch(seed):
    return (torch.randn(8, 8, generator=torch.Generator().manual_seed(seed)),)
