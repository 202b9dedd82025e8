"""Right: complex parameters, trained, frozen and unused, beside real ones."""

import torch
from torch import nn
from torch.nn import functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 7)
        self.filter = nn.Parameter(torch.randn(9, dtype=torch.complex64))
        self.bank = nn.Parameter(torch.randn(5, 9, dtype=torch.complex64))
        self.frozen = nn.Parameter(torch.randn(9, dtype=torch.complex64), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(3, dtype=torch.complex64))

    def forward(self, x, y):
        z = torch.fft.rfft(self.up(x))
        z = z * self.filter * self.frozen + z * self.bank.sum(0)
        return F.mse_loss(self.down(torch.fft.irfft(z, n=16)), y)


def model():
    return Model()


def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 16, generator=generator), torch.randn(8, 7, generator=generator)
