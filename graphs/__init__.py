"""The bottom room: the graph contract, token trees, the modules that get traced, and ONNX passes.

Only the modules that trace (`attention`, `target`, `medusa`) import torch, and only `passes` imports
onnx_ir; everything else here is numpy only, because the lean runtime imports it.
"""
