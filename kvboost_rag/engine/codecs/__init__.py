"""KV <-> compact KV (paper, section 4.5). ``CODECS`` is the one list of them."""

from kvboost_rag.engine.codecs.base import Codec, Packed
from kvboost_rag.engine.codecs.raw import RawCodec

CODECS: dict[str, Codec] = {codec.name: codec for codec in (RawCodec(),)}

__all__ = ["CODECS", "Codec", "Packed", "RawCodec"]
