"""Positional encodings: a file for each idea, with its variants."""

from lengthwise.encodings.alibi import Alibi
from lengthwise.encodings.alibi_2d import Alibi2d
from lengthwise.encodings.bam import Bam
from lengthwise.encodings.base import AttentionShape, Encoding, State
from lengthwise.encodings.cable import Cable, CableNoWeights, KCable
from lengthwise.encodings.carope import Carope
from lengthwise.encodings.cope import Cope
from lengthwise.encodings.dape import Dape, DapeV2
from lengthwise.encodings.deberta import Deberta
from lengthwise.encodings.fire import Fire
from lengthwise.encodings.fope import Fope
from lengthwise.encodings.fox import Fox
from lengthwise.encodings.grape_a import GrapeA
from lengthwise.encodings.grape_m import GrapeM, GrapeMContext
from lengthwise.encodings.headscale import HeadScale
from lengthwise.encodings.hope import Hope
from lengthwise.encodings.inkling import Inkling
from lengthwise.encodings.kerple import KerpleLog, KerplePower
from lengthwise.encodings.learned import Learned
from lengthwise.encodings.length_scales import Llama4Scale, LogFloor, LogN, Ministral3Scale
from lengthwise.encodings.none import NoPosition
from lengthwise.encodings.path import Path
from lengthwise.encodings.pope import Pope
from lengthwise.encodings.registry import ENCODINGS, make, register
from lengthwise.encodings.repo import Repo
from lengthwise.encodings.rope import Rope
from lengthwise.encodings.rope_2d import AxialRope, MixedRope
from lengthwise.encodings.sandwich import Sandwich
from lengthwise.encodings.selective_rope import SelectiveRope
from lengthwise.encodings.shaw import Shaw
from lengthwise.encodings.sink import Sink
from lengthwise.encodings.sinusoidal import Sinusoidal
from lengthwise.encodings.ssmax import SsMax
from lengthwise.encodings.stick_breaking import StickBreaking
from lengthwise.encodings.swin import Swin
from lengthwise.encodings.t5 import T5
from lengthwise.encodings.t5_clamped import T5Clamped
from lengthwise.encodings.transformer_xl import TransformerXL
from lengthwise.encodings.xpos import Xpos
from lengthwise.token_layout import PositionError

__all__ = ["ENCODINGS", "AttentionShape", "Encoding", "PositionError", "State", "make", "register"]

ENCODINGS |= {
    "alibi": Alibi,
    "kerple": KerpleLog,
    "kerple-power": KerplePower,
    "sandwich": Sandwich,
    "bam": Bam,
    "fire": Fire,
    "t5": T5,
    "t5-clamped": T5Clamped,
    "shaw": Shaw,
    "transformer-xl": TransformerXL,
    "deberta": Deberta,
    "inkling": Inkling,
    "alibi-2d": Alibi2d,
    "swin": Swin,
    "rope": Rope,
    "hope": Hope,
    "xpos": Xpos,
    "fope": Fope,
    "pope": Pope,
    "grape-m": GrapeM,
    "grape-m-ctx": GrapeMContext,
    "carope": Carope,
    "repo": Repo,
    "selective-rope": SelectiveRope,
    "axial-rope": AxialRope,
    "mixed-rope": MixedRope,
    "cable": Cable,
    "cable-nw": CableNoWeights,
    "k-cable": KCable,
    "fox": Fox,
    "grape-a": GrapeA,
    "cope": Cope,
    "dape": Dape,
    "dapev2": DapeV2,
    "stick-breaking": StickBreaking,
    "path": Path,
    "ssmax": SsMax,
    "logn": LogN,
    "llama4-scale": Llama4Scale,
    "ministral3-scale": Ministral3Scale,
    "log-floor": LogFloor,
    "headscale": HeadScale,
    "sink": Sink,
    "none": NoPosition,
    "learned": Learned,
    "sinusoidal": Sinusoidal,
}
