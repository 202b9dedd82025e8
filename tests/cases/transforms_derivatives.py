"""Derivatives by torch.func inside forward: gradients of each sample, Jacobians forward and in reverse, a product with
a vector, a Laplacian by the Hessian; functions close over parameters. Right: exact."""

import torch
from torch import nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 16), nn.Linear(16, 1)

    def forward(self, x):
        return self.down(self.up(x).tanh())[..., 0]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.field, self.mix = Field(), nn.Linear(4, 4)

    def forward(self, x):
        x = self.mix(x)
        value, slope = self.field(x), vmap(grad(self.field))(x)
        curvature = vmap(lambda a: hessian(self.field)(a).diagonal().sum())(x)
        spread = vmap(jacrev(lambda a: self.mix(a).sin()))(x) - vmap(jacfwd(lambda a: self.mix(a).cos()))(x)
        _, along = jvp(self.field, (x,), (torch.ones_like(x),))
        out, pull = vjp(lambda a: functional_call(self.mix, dict(self.mix.named_parameters()), (a,)).exp(), x)
        (pulled,) = pull(slope)
        return (
            (value + 0.1 * curvature - along).square().mean()
            + slope.square().mean()
            + (0.1 * spread.square().mean() + 0.1 * (out * pulled).mean())
        )


def model():
    return Model()


def batch(seed):
    return (torch.randn(8, 4, generator=torch.Generator().manual_seed(seed)),)
