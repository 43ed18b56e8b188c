"""The lean runtime: numpy, tokenizers, jinja2 and one backend library; never torch, transformers or onnx."""
