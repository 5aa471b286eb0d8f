"""Python objects as typed wire values and back, without pickle: `Encoder` on one side, `Decoder` on the other."""

from interpose.decoder import Decode, Decoder, Resolver
from interpose.encoder import MAX_DEPTH, Encoder, WireError

__all__ = ["MAX_DEPTH", "Decode", "Decoder", "Encoder", "Resolver", "WireError"]
