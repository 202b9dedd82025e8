"""An autograd function with several results, one of which has no gradient, one that writes in place, one that closes
over a constant and works in numpy. Right: exact under every plan."""

import torch
from torch import nn

scales = torch.linspace(0.5, 2.0, 16)


class Split(torch.autograd.Function):
    """Magnitude, sign and the largest position of each row."""

    @staticmethod
    def forward(ctx, x, both):
        sign, place = x.sign(), x.argmax(-1)
        ctx.save_for_backward(sign)
        ctx.mark_non_differentiable(sign, place)
        return x.abs(), sign, place, both

    @staticmethod
    def backward(ctx, grad, no_grad, no_place, no_flag):
        (sign,) = ctx.saved_tensors
        return 2.0 * grad * sign, None


class Shift(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, by):
        x.add_(by)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return 3.0 * grad, None


class InNumpy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.from_numpy(x.numpy() * 2.0)

    @staticmethod
    def backward(ctx, grad):
        return grad * scales


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.head = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x, y):
        size, sign, place, flag = Split.apply(self.a(x), "yes")
        assert flag == "yes"
        h = self.b(size * sign)
        Shift.apply(h, 0.25)
        h = h + InNumpy.apply(self.c(h.relu())) + nn.functional.one_hot(place, 16)
        return nn.functional.cross_entropy(self.head(h), y)


def model():
    return Model()


def batch(seed):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(8, 8, generator=g), torch.randint(4, (8,), generator=g)
