"""Worked examples, installed as ``cuflash.examples``: a tape-based autodiff, the demo's model, and embeddings."""
