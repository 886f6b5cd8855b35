"""Positional encodings: a file for each idea, with its variants."""

from lengthwise.encodings.alibi import Alibi
from lengthwise.encodings.base import AttentionShape, Encoding, State
from lengthwise.encodings.cable import Cable, CableNoWeights, KCable
from lengthwise.encodings.cope import Cope
from lengthwise.encodings.dape import Dape, DapeV2
from lengthwise.encodings.deberta import Deberta
from lengthwise.encodings.fire import Fire
from lengthwise.encodings.fox import Fox
from lengthwise.encodings.inkling import Inkling
from lengthwise.encodings.kerple import KerpleLog, KerplePower
from lengthwise.encodings.learned import Learned
from lengthwise.encodings.none import NoPosition
from lengthwise.encodings.registry import ENCODINGS, make, register
from lengthwise.encodings.rope import Rope
from lengthwise.encodings.shaw import Shaw
from lengthwise.encodings.sinusoidal import Sinusoidal
from lengthwise.encodings.t5 import T5
from lengthwise.encodings.t5_clamped import T5Clamped
from lengthwise.encodings.transformer_xl import TransformerXL
from lengthwise.token_layout import PositionError

__all__ = ["ENCODINGS", "AttentionShape", "Encoding", "PositionError", "State", "make", "register"]

ENCODINGS |= {
    "alibi": Alibi,
    "kerple": KerpleLog,
    "kerple-power": KerplePower,
    "fire": Fire,
    "t5": T5,
    "t5-clamped": T5Clamped,
    "shaw": Shaw,
    "transformer-xl": TransformerXL,
    "deberta": Deberta,
    "inkling": Inkling,
    "rope": Rope,
    "cable": Cable,
    "cable-nw": CableNoWeights,
    "k-cable": KCable,
    "fox": Fox,
    "cope": Cope,
    "dape": Dape,
    "dapev2": DapeV2,
    "none": NoPosition,
    "learned": Learned,
    "sinusoidal": Sinusoidal,
}
