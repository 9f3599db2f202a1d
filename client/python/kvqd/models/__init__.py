"""Models that run on kvq: weights, tokenizer and forward pass, with the K/V cache behind one small interface."""
