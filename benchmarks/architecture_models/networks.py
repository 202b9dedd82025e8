"""Networks of plain torch."""

from __future__ import annotations

from typing import Any

import torch
from models import BATCH, VOCAB, Case, random_classes, random_images, random_tokens
from torch import Tensor, nn
from torch.nn import functional as F


class Seq2Seq(nn.Module):
    """torch's own transformer, with a causal mask and padded sources."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(VOCAB, width), nn.Embedding(VOCAB, width)
        self.transformer = nn.Transformer(width, 4, 2, 2, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(width, VOCAB)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        read = target[:, :-1]
        mask = nn.Transformer.generate_square_subsequent_mask(read.shape[1], device=read.device)
        padding = torch.zeros_like(source, dtype=torch.float32).masked_fill(source == 0, float("-inf"))
        hidden = self.transformer(
            self.source(source), self.target(read), tgt_mask=mask, src_key_padding_mask=padding, tgt_is_causal=True
        )
        return F.cross_entropy(self.head(hidden).flatten(0, 1), target[:, 1:].flatten())


class UNet(nn.Module):
    """Down and up again with skip connections; a class of every pixel."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.down1, self.down2 = self._block(3, width), self._block(width, 2 * width)
        self.middle = self._block(2 * width, 4 * width)
        self.up2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.merge2 = self._block(4 * width, 2 * width)
        self.up1 = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.merge1 = self._block(2 * width, width)
        self.head = nn.Conv2d(width, 8, 1)

    @staticmethod
    def _block(a: int, b: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(2, b), nn.ReLU())

    def forward(self, image: Tensor, labels: Tensor) -> Tensor:
        first = self.down1(image)
        second = self.down2(F.max_pool2d(first, 2))
        x = self.up2(self.middle(F.max_pool2d(second, 2)))
        x = self.up1(self.merge2(torch.cat([x, second], dim=1)))
        return F.cross_entropy(self.head(self.merge1(torch.cat([x, first], dim=1))), labels)


class MixerLayer(nn.Module):
    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.tokens = nn.Sequential(nn.Linear(tokens, 2 * tokens), nn.GELU(), nn.Linear(2 * tokens, tokens))
        self.channels = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norms[1](x))


class MLPMixer(nn.Module):
    """Perceptrons over patches and over channels in turn."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, stride=8)
        self.layers = nn.Sequential(MixerLayer(16, width), MixerLayer(16, width))
        self.head = nn.Linear(width, 8)

    def forward(self, image: Tensor, labels: Tensor) -> Tensor:
        x = self.layers(self.patches(image).flatten(2).transpose(1, 2))
        return F.cross_entropy(self.head(x.mean(1)), labels)


class ResNeXt(nn.Module):
    """Bottlenecks of grouped convolutions, with batch statistics."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(width))
        self.blocks = nn.ModuleList(self._block(width, 32) for _ in range(2))
        self.head = nn.Linear(width, 8)

    @staticmethod
    def _block(outer: int, inner: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(outer, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(),
            nn.Conv2d(inner, inner, 3, padding=1, groups=8, bias=False), nn.BatchNorm2d(inner), nn.ReLU(),
            nn.Conv2d(inner, outer, 1, bias=False), nn.BatchNorm2d(outer),
        )  # fmt: skip

    def forward(self, image: Tensor, labels: Tensor) -> Tensor:
        x = F.relu(self.stem(image))
        for block in self.blocks:
            x = F.relu(x + block(x))
        return F.cross_entropy(self.head(F.adaptive_avg_pool2d(x, 1).flatten(1)), labels)


class DenseNet(nn.Module):
    """Every layer reads what all layers before it made."""

    def __init__(self, growth: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, stride=2, padding=1)
        widths = [16 + growth * n for n in range(4)]
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(w), nn.ReLU(), nn.Conv2d(w, growth, 3, padding=1, bias=False)) for w in widths
        )
        self.head = nn.Linear(16 + 4 * growth, 8)

    def forward(self, image: Tensor, labels: Tensor) -> Tensor:
        made = [self.stem(image)]
        for layer in self.layers:
            made.append(layer(torch.cat(made, dim=1)))
        return F.cross_entropy(self.head(torch.cat(made, dim=1).mean((2, 3))), labels)


class MobileNet(nn.Module):
    """Depthwise and pointwise convolutions in inverted bottlenecks."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(self._block(width, 2 * width) for _ in range(2))
        self.head = nn.Linear(width, 8)

    @staticmethod
    def _block(outer: int, inner: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(outer, inner, 1), nn.GroupNorm(4, inner), nn.ReLU6(),
            nn.Conv2d(inner, inner, 3, padding=1, groups=inner), nn.GroupNorm(4, inner), nn.ReLU6(),
            nn.Conv2d(inner, outer, 1), nn.GroupNorm(4, outer),
        )  # fmt: skip

    def forward(self, image: Tensor, labels: Tensor) -> Tensor:
        x = F.hardswish(self.stem(image))
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


class TemporalConvolutions(nn.Module):
    """Causal convolutions with growing gaps, each weight a norm and a direction; predicts the next token."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, width)
        self.layers = nn.ModuleList(
            nn.utils.parametrizations.weight_norm(nn.Conv1d(width, width, 3, dilation=2**n)) for n in range(2)
        )
        self.head = nn.Linear(width, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens[:, :-1]).transpose(1, 2)
        for number, layer in enumerate(self.layers):
            x = x + F.relu(layer(F.pad(x, (2 * 2**number, 0))))
        return F.cross_entropy(self.head(x.transpose(1, 2)).flatten(0, 1), tokens[:, 1:].flatten())


class VAE(nn.Module):
    """A variational autoencoder; its noise is an input."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, width, 4, stride=4), nn.ReLU(), nn.Flatten(), nn.Linear(width * 64, 64), nn.ReLU()
        )
        self.mean, self.log_variance = nn.Linear(64, 16), nn.Linear(64, 16)
        self.decoder = nn.Sequential(
            nn.Linear(16, width * 64), nn.ReLU(), nn.Unflatten(1, (width, 8, 8)),
            nn.ConvTranspose2d(width, 3, 4, stride=4),
        )  # fmt: skip

    def forward(self, image: Tensor, noise: Tensor) -> Tensor:
        hidden = self.encoder(image)
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        decoded = self.decoder(mean + torch.exp(0.5 * log_variance) * noise)
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(-1).mean()
        return F.mse_loss(decoded, image) + 0.01 * divergence


class Triplets(nn.Module):
    """One network for an anchor, one like it and one unlike it."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.network = nn.Sequential(
            nn.Conv2d(3, width, 4, stride=4), nn.InstanceNorm2d(width, affine=True), nn.PReLU(),
            nn.Flatten(), nn.Linear(width * 64, 32), nn.Tanh(), nn.Linear(32, 16),
        )  # fmt: skip

    def forward(self, anchor: Tensor, like: Tensor, unlike: Tensor) -> Tensor:
        return F.triplet_margin_loss(self.network(anchor), self.network(like), self.network(unlike), margin=2.0)


class CoordinateNetwork(nn.Module):
    """Sines of coordinates, as radiance fields are made of: points along rays, added up by their opacity."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(36, width), nn.Linear(width + 36, width)
        self.density, self.colour = nn.Linear(width, 1), nn.Linear(width, 3)

    def forward(self, points: Tensor, seen: Tensor) -> Tensor:
        scales = 2.0 ** torch.arange(6, device=points.device)
        angles = (points.unsqueeze(-1) * scales).flatten(-2)
        encoded = torch.cat([angles.sin(), angles.cos()], dim=-1)
        hidden = F.softplus(self.first(encoded))
        hidden = F.softplus(self.second(torch.cat([hidden, encoded], dim=-1)))
        opacity = 1 - torch.exp(-F.softplus(self.density(hidden).squeeze(-1)))
        clear = torch.cumprod(torch.cat([torch.ones_like(opacity[:, :1]), 1 - opacity[:, :-1] + 1e-6], dim=1), dim=1)
        colour = ((opacity * clear).unsqueeze(-1) * torch.sigmoid(self.colour(hidden))).sum(1)
        return F.mse_loss(colour, seen)


def _normal(step: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(13_000 + step + 7 * len(shape)))


def _translations(step: int) -> dict[str, Any]:
    return {"source": random_tokens(step), "target": random_tokens(step + 500)}


def _pictures(step: int) -> dict[str, Any]:
    return {"image": random_images(step), "labels": random_classes(step)}


def _pixels(step: int) -> dict[str, Any]:
    labels = torch.randint(0, 8, (BATCH, 32, 32), generator=torch.Generator().manual_seed(13_100 + step))
    return {"image": random_images(step), "labels": labels}


def _noise(step: int) -> dict[str, Any]:
    return {"image": random_images(step), "noise": _normal(step, BATCH, 16)}


def _triples(step: int) -> dict[str, Any]:
    return {"anchor": random_images(step), "like": random_images(step + 50), "unlike": random_images(step + 100)}


def _rays(step: int) -> dict[str, Any]:
    return {"points": _normal(step, BATCH, 12, 3), "seen": torch.sigmoid(_normal(step, BATCH, 3))}


NETWORKS = (
    Case(name="torch_transformer", build=Seq2Seq, batch=_translations),
    Case(name="unet", build=UNet, batch=_pixels),
    Case(name="mlp_mixer", build=MLPMixer, batch=_pictures),
    Case(name="resnext", build=ResNeXt, batch=_pictures, learning_rate=0.02),
    Case(name="densenet", build=DenseNet, batch=_pictures, learning_rate=0.02),
    Case(name="mobilenet", build=MobileNet, batch=_pictures),
    Case(name="temporal_convolutions", build=TemporalConvolutions, batch=lambda step: {"tokens": random_tokens(step)}),
    Case(name="vae", build=VAE, batch=_noise),
    Case(name="triplets", build=Triplets, batch=_triples),
    Case(name="radiance_field", build=CoordinateNetwork, batch=_rays),
)
