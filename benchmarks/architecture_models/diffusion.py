"""Diffusion models and what they work on; noise and times are inputs, so that a step is a function of its batch."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from models import BATCH, Case
from torch import Tensor, nn
from torch.nn import functional as F


class Denoiser(nn.Module):
    """A network of diffusers with the loss it is trained with: the mean square of the noise that it does not find."""

    def __init__(self, architecture: str, **config: Any) -> None:
        super().__init__()
        self.network: nn.Module = getattr(importlib.import_module("diffusers"), architecture)(**config)

    def forward(self, noisy: Tensor, time: Tensor, noise: Tensor, **conditions: Tensor) -> Tensor:
        predicted = self.network(noisy, timestep=time, return_dict=False, **conditions)[0]
        return F.mse_loss(predicted[:, : noise.shape[1]], noise)


class FlowTransformer(nn.Module):
    """A transformer over noisy patches and words together, each with weights of its own, trained on velocities."""

    def __init__(self, architecture: str, **config: Any) -> None:
        super().__init__()
        self.network: nn.Module = getattr(importlib.import_module("diffusers"), architecture)(**config)

    def forward(self, noisy: Tensor, time: Tensor, noise: Tensor, words: Tensor, pooled: Tensor) -> Tensor:
        found = self.network(
            noisy, timestep=time, encoder_hidden_states=words, pooled_projections=pooled, return_dict=False
        )[0]
        return F.mse_loss(found, noise)


class LatentCoder(nn.Module):
    """The autoencoder of latent diffusion; the noise of its latents is given."""

    def __init__(self) -> None:
        super().__init__()
        from diffusers import AutoencoderKL

        self.coder = AutoencoderKL(
            block_out_channels=(8, 16), down_block_types=("DownEncoderBlock2D",) * 2, latent_channels=2,
            up_block_types=("UpDecoderBlock2D",) * 2, layers_per_block=1, norm_num_groups=4, sample_size=16,
        )  # fmt: skip

    def forward(self, image: Tensor, noise: Tensor) -> Tensor:
        latent = self.coder.encode(image).latent_dist
        decoded = self.coder.decode(latent.mean + latent.std * noise).sample
        divergence = 0.5 * (latent.mean.square() + latent.var - 1 - latent.logvar).mean()
        return F.mse_loss(decoded, image) + 0.1 * divergence


class AdaptiveBlock(nn.Module):
    """A transformer block whose norms are scaled, shifted and gated by a condition."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.condition = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))
        self.norms = nn.ModuleList(nn.LayerNorm(width, elementwise_affine=False) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(approximate="tanh"), nn.Linear(2 * width, width))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift, scale, gate, shift2, scale2, gate2 = self.condition(condition).unsqueeze(1).chunk(6, dim=-1)
        h = self.norms[0](x) * (1 + scale) + shift
        rows, length, width = h.shape
        query, key, value = self.qkv(h).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(rows, length, width)
        x = x + gate * self.out(attended)
        return x + gate2 * self.mlp(self.norms[1](x) * (1 + scale2) + shift2)


class DiT(nn.Module):
    """A diffusion transformer over patches, conditioned on a time and a class."""

    def __init__(self, width: int = 32, heads: int = 4, depth: int = 2) -> None:
        super().__init__()
        self.width = width
        self.patches = nn.Conv2d(4, width, 2, stride=2)
        self.positions = nn.Parameter(torch.randn(1, 16, width) / 10)
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.classes = nn.Embedding(9, width)
        self.blocks = nn.ModuleList(AdaptiveBlock(width, heads) for _ in range(depth))
        self.head = nn.Linear(width, 2 * 2 * 4)

    def forward(self, noisy: Tensor, time: Tensor, noise: Tensor, label: Tensor) -> Tensor:
        frequencies = torch.exp(-torch.arange(self.width // 2, device=time.device) / 4.0).to(self.positions)
        angles = time.unsqueeze(-1) * frequencies
        condition = self.time(torch.cat([angles.cos(), angles.sin()], dim=-1)) + self.classes(label)
        x = self.patches(noisy).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x, condition)
        found = F.fold(self.head(x).transpose(1, 2), (8, 8), 2, stride=2)
        return F.mse_loss(found, noise)


def _noisy(step: int, channels: int = 4, size: int = 8) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(12_000 + step)
    return {
        "noisy": torch.randn(BATCH, channels, size, size, generator=generator),
        "time": torch.randint(0, 1000, (BATCH,), generator=generator),
        "noise": torch.randn(BATCH, channels, size, size, generator=generator),
    }


def _with_classes(name: str) -> Callable[[int], dict[str, Any]]:
    def batch(step: int) -> dict[str, Any]:
        labels = torch.randint(0, 8, (BATCH,), generator=torch.Generator().manual_seed(12_100 + step))
        return {**_noisy(step), name: labels}

    return batch


def _with_words(name: str) -> Callable[[int], dict[str, Any]]:
    def batch(step: int) -> dict[str, Any]:
        return {**_noisy(step), name: torch.randn(BATCH, 6, 16, generator=torch.Generator().manual_seed(12_200 + step))}

    return batch


def _flow(step: int) -> dict[str, Any]:
    pooled = torch.randn(BATCH, 16, generator=torch.Generator().manual_seed(12_300 + step))
    return {**_with_words("words")(step), "pooled": pooled}


def _latents(step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(12_400 + step)
    image = torch.randn(BATCH, 3, 16, 16, generator=generator)
    return {"image": image, "noise": torch.randn(BATCH, 2, 8, 8, generator=generator)}


DIFFUSION = (
    Case(name="dit", build=DiT, batch=_with_classes("label")),
    Case(
        name="ddpm_unet", batch=_noisy,
        build=partial(
            Denoiser, "UNet2DModel", sample_size=8, in_channels=4, out_channels=4, layers_per_block=1,
            block_out_channels=(16, 32), down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"), norm_num_groups=4, attention_head_dim=8,
        ),
    ),
    Case(
        name="latent_unet", batch=_with_words("encoder_hidden_states"),
        build=partial(
            Denoiser, "UNet2DConditionModel", sample_size=8, in_channels=4, out_channels=4, layers_per_block=1,
            block_out_channels=(16, 32), down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), cross_attention_dim=16, norm_num_groups=4,
            attention_head_dim=8,
        ),
    ),
    Case(
        name="pixart", batch=_with_words("encoder_hidden_states"),
        build=partial(
            Denoiser, "PixArtTransformer2DModel", sample_size=8, num_layers=2, attention_head_dim=8,
            num_attention_heads=4, in_channels=4, out_channels=4, cross_attention_dim=32, caption_channels=16,
            use_additional_conditions=False,
        ),
    ),
    Case(
        name="stable_diffusion_3", batch=_flow,
        build=partial(
            FlowTransformer, "SD3Transformer2DModel", sample_size=8, patch_size=2, in_channels=4, out_channels=4,
            num_layers=2, attention_head_dim=8, num_attention_heads=4, joint_attention_dim=16,
            caption_projection_dim=32, pooled_projection_dim=16, pos_embed_max_size=8,
        ),
    ),
    Case(name="latent_autoencoder", build=LatentCoder, batch=_latents),
)  # fmt: skip
