"""The engine: torch, transformers and safetensors, and of this package only ``errors``. Could be lifted out whole."""
