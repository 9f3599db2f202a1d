"""The device of a program that brings its own kvqd along. Invariant: one device, also where there are several GPUs."""

import torch


def one_device(device):
    """`device` as kvqd takes it, for "cuda": torch's first GPU by its UUID."""
    return f"GPU-{torch.cuda.get_device_properties(0).uuid}" if device == "cuda" else device
