"""A small LLaVA with random weights, which reads images of 112 pixels as 64 tokens each."""

from pathlib import Path

import torch
import transformers

PIXELS, PATCH = 112, 14
IMAGE = "<image>"
TINY = Path(__file__).parents[1] / "data" / "tiny-llama"


def make_image_model(folder: Path) -> str:
    """Write the model and its processor, with the tiny model's tokenizer; returns the folder."""
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY)
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE]})
    text = transformers.LlamaConfig(
        vocab_size=len(tokenizer) + 63,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
    )
    vision = transformers.CLIPVisionConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        image_size=PIXELS,
        patch_size=PATCH,
        projection_dim=64,
    )
    place = tokenizer.convert_tokens_to_ids(IMAGE)
    torch.manual_seed(0)
    model = transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=place)
    )
    for weights in model.parameters():
        if weights.dim() > 1:
            torch.nn.init.normal_(weights, std=0.08)  # large enough that images show in answers
    model.to(torch.bfloat16).save_pretrained(folder)
    size = {"height": PIXELS, "width": PIXELS}
    transformers.LlavaProcessor(
        image_processor=CLIPImageProcessorPil(size={"shortest_edge": PIXELS}, crop_size=size),
        tokenizer=tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    ).save_pretrained(folder)
    return str(folder)
