"""ResNet-50 on images of 224 × 224, with the loss of a classifier of 1000 classes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Blocks and width of each group, of which all but the first halve the image.
GROUPS = (3, 64), (4, 128), (6, 256), (3, 512)
EXPANSION = 4


class Block(nn.Module):
    """A 1 × 1, a 3 × 3 and a 1 × 1 convolution beside a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = EXPANSION * width
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.norm1, self.norm2, self.norm3 = (nn.BatchNorm2d(size) for size in (width, width, outputs))
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        return F.relu(self.norm3(self.conv3(y)) + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self, num_classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 7, 2, padding=3, bias=False)
        self.norm = nn.BatchNorm2d(64)
        blocks, inputs = [], 64
        for number, (count, width) in enumerate(GROUPS):
            for index in range(count):
                blocks.append(Block(inputs, width, 2 if number and not index else 1))
                inputs = EXPANSION * width
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(inputs, num_classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Images (batch, 3, height, width) and their classes (batch,); the mean loss."""
        x = F.max_pool2d(F.relu(self.norm(self.stem(images))), 3, 2, padding=1)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


def model() -> nn.Module:
    return ResNet()


def example_inputs(batch_size: int = 256, seq_len: int | None = None) -> tuple[Tensor, Tensor]:
    return torch.zeros(batch_size, 3, 224, 224), torch.zeros(batch_size, dtype=torch.long)
