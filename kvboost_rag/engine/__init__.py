"""The engine: torch, transformers and safetensors only, and of this package only ``errors``. Could be lifted out whole."""
