"""Triton kernels for Hopper and their launchers, one file per idea; importing one of them imports Triton."""
