"""sc_core put to work: a thin Ray actor, TransferQueue, torch trainers and generators."""
