"""Small instances of architectures by family, with a batch of data each: real configurations, dropout 0."""

from __future__ import annotations

from models import Case

from .audio import AUDIO
from .decoders import DECODERS
from .diffusion import DIFFUSION
from .encoder_decoders import ENCODER_DECODERS
from .encoders import ENCODERS
from .experts import MOE_MODELS
from .graphs import GRAPHS
from .multimodal import MULTIMODAL
from .networks import NETWORKS
from .recommendation import RECOMMENDATION
from .recurrent import RECURRENT
from .vision import VISION

FAMILIES: dict[str, tuple[Case, ...]] = {
    "decoders": DECODERS,
    "encoders": ENCODERS,
    "encoder-decoders": ENCODER_DECODERS,
    "mixtures": MOE_MODELS,
    "recurrent": RECURRENT,
    "vision": VISION,
    "audio": AUDIO,
    "multimodal": MULTIMODAL,
    "diffusion": DIFFUSION,
    "graphs": GRAPHS,
    "recommendation": RECOMMENDATION,
    "networks": NETWORKS,
}
