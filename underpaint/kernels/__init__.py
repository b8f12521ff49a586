"""GPU kernels, one file each: kernel, wrapper and reference. Nothing here knows requests, pools or models."""
