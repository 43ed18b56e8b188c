"""A Llama of a given size with random weights: what decoding costs depends on shapes, not on what they say.

    python -m speccompile.tools.bench.random_model OUT --tokenizer MODEL

The default is the shape of TinyLlama (22 layers of 2048, feed-forward 5632, 32 query and 4 key and value heads), some
1.1 billion parameters by vocabulary. With `bench --synthetic-accept` it shows what speculation gains at a size that no
weights are at hand for.
"""

from __future__ import annotations

from pathlib import Path

import click

PATH = click.Path(path_type=Path)


@click.command()
@click.argument("out", type=PATH)
@click.option("--tokenizer", type=PATH, required=True, help="Model (folder or .gguf) whose tokenizer it takes.")
@click.option("--layers", type=int, default=22, show_default=True)
@click.option("--width", type=int, default=2048, show_default=True)
@click.option("--feed-forward", type=int, default=5632, show_default=True)
@click.option("--heads", type=int, default=32, show_default=True)
@click.option("--key-value-heads", type=int, default=4, show_default=True)
def main(
    out: Path, tokenizer: Path, layers: int, width: int, feed_forward: int, heads: int, key_value_heads: int
) -> None:
    """Write a transformers folder OUT."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from speccompile.compiler.checkpoint import read_model
    from speccompile.compiler.publish import staged

    source = read_model(tokenizer)
    config = LlamaConfig(
        vocab_size=source.model.config.get_text_config().vocab_size,
        hidden_size=width,
        intermediate_size=feed_forward,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        max_position_embeddings=8192,
        bos_token_id=source.tokenizer.bos_token_id,
        eos_token_id=source.eos_ids[0],
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    with staged(out, False) as folder:
        model = LlamaForCausalLM(config)
        model.save_pretrained(folder)
        source.tokenizer.save_pretrained(folder)
    click.echo(f"{out}: {sum(parameter.numel() for parameter in model.parameters()):,} parameters")


if __name__ == "__main__":
    main()
