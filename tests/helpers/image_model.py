"""A small BLIP-2 with random weights, which reads images of 112 pixels as 64 tokens each."""

from pathlib import Path

import numpy as np
import torch
import transformers
from PIL import Image

PIXELS, IMAGE_TOKENS = 112, 64
TINY = Path(__file__).parents[1] / "data" / "tiny-llama"


def make_image_model(folder: Path) -> str:
    """Write the model and its processor, with the tiny model's tokenizer; returns the folder."""
    from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil

    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    small = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = transformers.OPTConfig(
        vocab_size=len(tokenizer) + 63,
        hidden_size=256,
        word_embed_proj_dim=256,
        ffn_dim=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=2048,
    )
    config = transformers.Blip2Config(
        vision_config=transformers.Blip2VisionConfig(**small, image_size=PIXELS, patch_size=14).to_dict(),
        qformer_config=transformers.Blip2QFormerConfig(**small, encoder_hidden_size=64).to_dict(),
        text_config=text.to_dict(),
        num_query_tokens=IMAGE_TOKENS,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
    )
    torch.manual_seed(0)
    model = transformers.Blip2ForConditionalGeneration(config)
    for weights in model.parameters():
        if weights.dim() > 1:
            torch.nn.init.normal_(weights, std=0.1)  # large enough that images show in answers
    model.to(torch.bfloat16).save_pretrained(folder)
    images = BlipImageProcessorPil(size={"height": PIXELS, "width": PIXELS})
    transformers.Blip2Processor(images, tokenizer, num_query_tokens=IMAGE_TOKENS).save_pretrained(folder)
    return str(folder)


def picture(number: int) -> Image.Image:
    """Return an image of random pixels."""
    pixels = np.random.default_rng(number).integers(0, 256, (PIXELS, PIXELS, 3), dtype=np.uint8)
    return Image.fromarray(pixels)
