"""KV <-> compact KV (paper, section 4.5). ``CODECS`` is the one list of them."""

from kvboost_rag.engine.codecs.base import Codec, Packed
from kvboost_rag.engine.codecs.int4 import Int4Codec
from kvboost_rag.engine.codecs.int8 import Int8Codec
from kvboost_rag.engine.codecs.raw import RawCodec

CODECS: dict[str, Codec] = {codec.name: codec for codec in (RawCodec(), Int8Codec(), Int4Codec())}

__all__ = ["CODECS", "Codec", "Int4Codec", "Int8Codec", "Packed", "RawCodec"]
